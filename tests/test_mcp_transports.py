"""Real MCP servers: over stdio and streamable HTTP, that come up, fail, hang and die, and what is left of them."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from environment_fixtures import in_turn, play

from environments import Environment, Message, Policy, Task, load
from environments._mcp_client import LONGEST_RESULT, Address, Command, ServerFailed, connected
from environments._mcp_stock import TOOLS, Stock
from environments._tool_calls import as_text

SEED = 149
STOCKROOM = [sys.executable, "-m", "environments._mcp_stock_server", "--seed"]
DONE = as_text("complete_task", {"answer": "8"})
PATIENCE = 30.0

# A server whose tools go wrong in every manner; it writes its process id into the file that it is given.
HOSTILE = """
import asyncio, os, sys
import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

def tool(name):
    return types.Tool(name=name, description=name, input_schema={"type": "object"})

async def list_tools(context, params):
    return types.ListToolsResult(tools=[tool(name) for name in ("hang", "die", "raise", "huge", "a.picture")])

async def call_tool(context, params):
    if params.name == "hang":
        await asyncio.sleep(600)
    if params.name == "die":
        os._exit(3)
    if params.name == "raise":
        raise KeyError("broken")
    if params.name == "huge":
        return types.CallToolResult(content=[types.TextContent(type="text", text="a" * 30_000)])
    picture = types.ImageContent(type="image", data="", mime_type="image/png")
    return types.CallToolResult(content=[types.TextContent(type="text", text="here:"), picture])

async def main():
    server = Server("hostile", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
asyncio.run(main())
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Command:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    return Command([sys.executable, str(tmp_path / "hostile.py"), str(tmp_path / "pids")])


def pids(tmp_path: Path) -> list[int]:
    file = tmp_path / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "a", "seed": SEED, "task": "How many wires are there?"}))
    return file


def with_server(tasks: Path, **options: Any) -> tuple[Environment, Task]:
    environment = load("mcp_server", scenarios=tasks, **options)
    return environment, environment.tasks("train")[0]


@pytest.fixture
def http() -> Iterator[str]:
    """The URL of the stockroom over HTTP."""
    with over_http() as (_, url):
        yield url


@contextmanager
def over_http() -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*STOCKROOM, str(SEED), "--port", str(port)])
    try:
        wait_until(lambda: _listens(port))
        yield server, f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait(timeout=PATIENCE)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def facts(target: Any) -> tuple[Any, ...]:
    async with connected(target, PATIENCE, PATIENCE) as session:
        tools = [tool["function"] for tool in session.tools]
        wires = await session.call("find", {"item": "wires"})
        wrong = await session.call("find", {"item": "gold"})
        return tools, wires, wrong.failed, json.loads(await session.read("stock://state"))


async def test_the_stockroom_is_the_same_over_every_transport(http: str) -> None:
    tools, wires, failed, state = await facts(Address(http))
    assert [tool["parameters"] for tool in tools] == [tool["input_schema"] for tool in TOOLS]
    assert (wires.text, wires.failed, failed) == ("A: 5, C: 3", False, True)
    assert state == json.loads(Stock.of_seed(SEED).state())
    assert await facts(Command([*STOCKROOM, str(SEED)])) == (tools, wires, failed, state)


def test_a_server_named_by_command_or_url_gets_the_tasks_seed(http: str, tasks: Path) -> None:
    """The command's stockroom is of the task's seed; the URL's is of the server's own."""
    count = [as_text("find", {"item": "wires"}), DONE]
    told: list[Message] = []

    def answers() -> Callable[[Any], str | None]:
        replies = in_turn(count)

        def answer(messages: Any) -> str | None:
            told.append(messages[-1])
            return replies(messages)

        return answer

    for options in ({"command": [*STOCKROOM, "{seed}"]}, {"url": http}):
        environment, task = with_server(tasks, **options)
        assert play(environment, task, answers()).reward == 1
        assert told[-1]["content"] == "A: 5, C: 3"


async def test_what_a_tool_does_wrong_is_told_and_the_session_goes_on(hostile: Command, tmp_path: Path) -> None:
    async with connected(hostile, PATIENCE, call_timeout=0.5) as session:
        names = [tool["function"]["name"] for tool in session.tools]
        assert names == ["hang", "die", "raise", "huge", "a_picture"]
        hung, raised, huge = [await session.call(name, {}) for name in ("hang", "raise", "huge")]
        assert hung.failed and "timed out" in hung.text.lower()
        assert raised.failed and raised.text
        assert huge.failed and huge.text == f"the answer has 30000 characters, more than {LONGEST_RESULT}: ask for less"
        assert (await session.call("a_picture", {})).text == "here:\n[image]"
        assert (await session.call("nothing", {})).failed
    [pid] = pids(tmp_path)
    assert not alive(pid)


def test_a_server_that_dies_fails_the_attempt(hostile: Command, tasks: Path, tmp_path: Path) -> None:
    environment, task = with_server(tasks, command=hostile.arguments)
    with pytest.raises(ServerFailed, match=r"the MCP server .*hostile.py.* is gone"):
        play(environment, task, in_turn([as_text("die", {})]))
    assert not any(map(alive, pids(tmp_path)))


async def test_a_server_over_http_that_dies_ends_the_session() -> None:
    with over_http() as (server, url), pytest.raises(ServerFailed, match=rf"MCP server {url} is gone: "):
        async with connected(Address(url), PATIENCE, PATIENCE) as session:
            assert not (await session.call("list_shelf", {"shelf": "A"})).failed
            server.kill()
            server.wait(timeout=PATIENCE)
            await session.call("list_shelf", {"shelf": "A"})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/nowhere/server"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit('no key\\nset KEY')"], "it wrote: no key set KEY"),
        ([sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)"], "no answer in time"),
    ],
)
def test_a_server_that_does_not_come_up_is_one_line(arguments: list[str], reason: str, tasks: Path) -> None:
    environment, task = with_server(tasks, command=arguments, startup_timeout=2)
    started = time.monotonic()
    with pytest.raises(ServerFailed, match=reason) as error:
        play(environment, task, in_turn([]))
    assert "\n" not in str(error.value) and time.monotonic() - started < 15


def test_a_url_where_nothing_listens_is_one_line(tasks: Path) -> None:
    environment, task = with_server(tasks, url="http://127.0.0.1:9/mcp")
    with pytest.raises(ServerFailed, match=r"MCP server http://127\.0\.0\.1:9/mcp can't be used: ") as error:
        play(environment, task, in_turn([]))
    assert "\n" not in str(error.value)


def test_what_the_model_raises_is_raised_bare(tasks: Path) -> None:
    """Not in a group of exceptions, as task groups have it: failures are counted by their names."""
    environment, task = with_server(tasks, command=[*STOCKROOM, "1"])

    def answer(messages: Any) -> str:
        raise LookupError("no model")

    with pytest.raises(LookupError, match="no model"):
        play(environment, task, answer)


async def test_a_cancelled_attempt_leaves_no_process(hostile: Command, tasks: Path, tmp_path: Path) -> None:
    environment, task = with_server(tasks, command=hostile.arguments)
    asked = asyncio.Event()

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.sleep(600)
        raise AssertionError

    attempt = asyncio.create_task(environment.rollout(task, Policy(complete, base_url="", api_key="", model="m")))
    await asyncio.wait_for(asked.wait(), PATIENCE)
    [pid] = pids(tmp_path)
    assert alive(pid)
    attempt.cancel()
    await asyncio.wait({attempt}, timeout=PATIENCE)
    assert attempt.cancelled() and not alive(pid)


def test_a_killed_attempt_leaves_no_process(hostile: Command, tmp_path: Path) -> None:
    """The server's stdin ends with its client, whoever ended that. One that minds this not is the keeper's to end."""
    script = textwrap.dedent(f"""
        import asyncio
        from environments._mcp_client import Command, connected

        async def main():
            async with connected(Command({list(hostile.arguments)!r}), 60, 60) as session:
                await session.call("hang", {{}})

        asyncio.run(main())
    """)
    client = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: bool(pids(tmp_path)))
    [pid] = pids(tmp_path)
    assert alive(pid)
    os.kill(client.pid, signal.SIGKILL)
    client.wait(timeout=PATIENCE)
    wait_until(lambda: not alive(pid))


def test_headers_are_sent_with_what_the_environment_has(monkeypatch: pytest.MonkeyPatch, tasks: Path) -> None:
    monkeypatch.setenv("SERVERS_TOKEN", "s3cr3t")
    headers = {"Authorization": "Bearer ${SERVERS_TOKEN}", "X-Price": "5 $$"}
    with guarded_door() as (url, seen):
        environment, task = with_server(tasks, url=url, headers=headers)
        with pytest.raises(ServerFailed, match="can't be used") as error:
            play(environment, task, in_turn([]))
    assert (seen[0]["authorization"], seen[0]["x-price"]) == ("Bearer s3cr3t", "5 $")
    assert "s3cr3t" not in str(error.value) + environment.model_dump_json()


@pytest.mark.parametrize(
    ("value", "reason"),
    [("Bearer ${NOT_SET}", "needs the environment variable NOT_SET, which is not set"), ("5 $", "names no variable")],
)
def test_a_header_that_can_not_be_filled_in_is_one_line(value: str, reason: str, tasks: Path) -> None:
    environment, task = with_server(tasks, url="http://127.0.0.1:9/mcp", headers={"Authorization": value})
    with pytest.raises(ServerFailed, match=f"127.0.0.1:9/mcp can't be used: the header Authorization .*{reason}"):
        play(environment, task, in_turn([]))


@contextmanager
def guarded_door() -> Iterator[tuple[str, list[Message]]]:
    """A URL that lets nobody in, and the headers that came."""
    seen: list[Message] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_error(401)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp", seen
        server.shutdown()


async def test_a_command_gets_the_variables_that_are_named_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SERVERS_KEY", "for the server")
    monkeypatch.setenv("OTHERS_KEY", "for others")
    show = f"import os, sys; open({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ))); sys.exit(1)"
    with pytest.raises(ServerFailed):
        async with connected(Command([sys.executable, "-c", show], ["SERVERS_KEY", "NOT_SET"]), PATIENCE, 1):
            pass
    given = (tmp_path / "env").read_text()
    assert "for the server" in given and re.search("PATH", given) and "OTHERS_KEY" not in given
