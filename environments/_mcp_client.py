"""A connection to an MCP server for the time of one rollout: its tools as OpenAI's API has them, and calls of them.

What a tool does wrong comes back as text for the model. What ends the connection is raised, and ends the attempt. A
server that was started here ends with its connection: its stdin is closed, after 2 s it gets SIGTERM, after 4 s
SIGKILL, and all of its process group with it. Where this process is killed, the step's keeper sees to that.
"""

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from string import Template
from typing import IO, TYPE_CHECKING, Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

if TYPE_CHECKING:
    from mcp.server import Server

CONNECTING = 30.0
"""Seconds until a connection stands, or takes what is sent. Answers have the session's own timeouts."""
MOST_PAGES = 100
LONGEST_RESULT = 20_000
"""Characters of a tool's answer; what is longer is refused."""
LAST_WORDS = 300
NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


class ServerFailed(Exception):
    """The MCP server can't be used, or is gone. The message names it."""


@dataclass(frozen=True)
class Command:
    """A server to start, which speaks on stdin and stdout."""

    arguments: Sequence[str]
    forwarded: Sequence[str] = ()
    """Names of environment variables that it gets, besides PATH, HOME and the like."""


@dataclass(frozen=True)
class Address:
    """A server that speaks streamable HTTP."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request. `${NAME}` in them stands for an environment variable."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered."""

    text: str
    failed: bool = False


class Session:
    """A server that is connected."""

    def __init__(self, client: Client, tools: Sequence[types.Tool], where: str) -> None:
        self._client, self._where = client, where
        self._names = {NOT_IN_A_NAME.sub("_", tool.name)[:64]: tool.name for tool in tools}
        if len(self._names) < len(tools):
            raise ServerFailed(f"{where} has two tools that OpenAI's API would call the same")
        self.tools = [_as_openai(name, tool) for name, tool in zip(self._names, tools, strict=True)]
        """As OpenAI's API has them."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool; what it does wrong, a wait that is too long included, is in the result.

        Raises `ServerFailed` where the connection is gone.
        """
        if name not in self._names:
            return ToolResult(f"no tool {name!r}; there are {', '.join(self._names) or 'none'}", failed=True)
        try:
            result = await self._client.call_tool(self._names[name], arguments)
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise ServerFailed(f"{self._where} is gone: {error.message}") from None
            return ToolResult(error.message, failed=True)
        except (RuntimeError, ValidationError) as error:  # how the client says that an answer breaks the tool's schema
            return ToolResult(f"the tool's answer is malformed: {error}", failed=True)
        return _bounded(ToolResult(_text(result), result.is_error))

    async def read(self, uri: str) -> str:
        """A resource's text. Raises `MCPError` where there is none."""
        result = await self._client.read_resource(uri)
        return "".join(part.text for part in result.contents if isinstance(part, types.TextResourceContents))


@asynccontextmanager
async def connected(
    target: "Command | Address | Server[Any]", startup_timeout: float, call_timeout: float
) -> AsyncIterator[Session]:
    """A server, by command, by address or in this process. The timeouts, in seconds, are for its tools and an answer.

    Raises `ServerFailed`; what is raised meanwhile comes out bare, not in a task group's `ExceptionGroup`.
    """
    where, session = _name(target), None
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        try:
            async with (
                asyncio.timeout(startup_timeout) as starting,
                Client(_transport(target, written), read_timeout_seconds=call_timeout) as client,
            ):
                session = Session(client, await _all_tools(client), where)
                starting.reschedule(None)
                yield session
        except ExceptionGroup as group:
            raise _explained(_first(group), where, session, written) from None
        except (OSError, MCPError, httpx2.HTTPError) as error:
            raise _explained(error, where, session, written) from None


def _transport(target: "Command | Address | Server[Any]", written: IO[str]) -> Any:
    if isinstance(target, Address):
        return _over_http(target.url, {name: _filled_in(target, name) for name in target.headers})
    return _on_stdio(target, written) if isinstance(target, Command) else target


def _on_stdio(target: Command, written: IO[str]) -> Any:
    command, *arguments = target.arguments
    environment = {name: os.environ[name] for name in target.forwarded if name in os.environ}
    return stdio_client(StdioServerParameters(command=command, args=arguments, env=environment), written)  # type: ignore[arg-type]


@asynccontextmanager
async def _over_http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    async with (
        httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(CONNECTING, read=None)) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def _filled_in(target: Address, header: str) -> str:
    """The header's value. Raises `ServerFailed`, which does not show it: it may hold a secret."""
    try:
        return Template(target.headers[header]).substitute(os.environ)
    except KeyError as error:
        reason = f"needs the environment variable {error.args[0]}, which is not set here"
    except ValueError:
        reason = "has a $ that names no variable: write ${NAME}, or $$ for a dollar"
    raise ServerFailed(f"{_name(target)} can't be used: the header {header} {reason}")


def _name(target: "Command | Address | Server[Any]") -> str:
    if isinstance(target, Address):
        return f"the MCP server {target.url}"
    return f"the MCP server {' '.join(target.arguments) if isinstance(target, Command) else 'here'}"


async def _all_tools(client: Client) -> list[types.Tool]:
    tools, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _as_openai(name: str, tool: types.Tool) -> dict[str, Any]:
    function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(result: types.CallToolResult) -> str:
    parts = [part.text if isinstance(part, types.TextContent) else f"[{part.type}]" for part in result.content]
    return "\n".join(parts) if parts else json.dumps(result.structured_content)


def _bounded(result: ToolResult) -> ToolResult:
    length = len(result.text)
    if length <= LONGEST_RESULT:
        return result
    return ToolResult(f"the answer has {length} characters, more than {LONGEST_RESULT}: ask for less", failed=True)


def _explained(error: BaseException, where: str, session: Session | None, written: IO[str]) -> BaseException:
    if session:
        # Only the connection speaks HTTP here; whatever else is raised is the agent's or the reward's.
        return ServerFailed(f"{where} is gone: {error}") if isinstance(error, httpx2.HTTPError) else error
    written.seek(0)
    last = " ".join(written.read().split())[-LAST_WORDS:]
    reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return ServerFailed(f"{where} can't be used: {reason}" + (f"; it wrote: {last}" if last else ""))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
