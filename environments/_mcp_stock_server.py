"""The MCP server that comes with the project: a stockroom with four tools, made of a seed, offline.

    python -m environments._mcp_stock_server --seed 7                     # stdio
    python -m environments._mcp_stock_server --seed 7 --port 8000         # http://127.0.0.1:8000/mcp

Over HTTP all clients share one stockroom; a process on stdio has its own.
"""

import argparse
import asyncio
from typing import Any

from mcp import types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from environments._mcp_stock import STATE, TOOLS, Stock, StockError, checked

NAMES = [tool["name"] for tool in TOOLS]
Context = ServerRequestContext[Any]


def stock_server(stock: Stock) -> Server[Any]:
    """A server of this stockroom, which its tools change."""

    async def list_tools(context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in TOOLS])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in NAMES:
            raise MCPError(types.INVALID_PARAMS, f"no tool {params.name!r}; there are {', '.join(NAMES)}")
        try:
            text, wrong = stock.call(params.name, checked(params.name, params.arguments or {})), False
        except StockError as error:
            text, wrong = str(error), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=wrong)

    async def read(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        if str(params.uri) != STATE:
            raise MCPError(types.INVALID_PARAMS, f"no resource {params.uri}; there is {STATE}")
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=STATE, text=stock.state())])

    return Server("stockroom", on_list_tools=list_tools, on_call_tool=call_tool, on_read_resource=read)


async def _on_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def main() -> None:
    """Serves until stdin ends, or, over HTTP, until it is stopped."""
    parser = argparse.ArgumentParser(description="A stockroom as an MCP server.")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds, equal stockrooms")
    parser.add_argument("--port", type=int, help="serve streamable HTTP on this port of 127.0.0.1, not stdio")
    arguments = parser.parse_args()
    server = stock_server(Stock.of_seed(arguments.seed))
    if arguments.port is None:
        asyncio.run(_on_stdio(server))
    else:
        import uvicorn

        uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
