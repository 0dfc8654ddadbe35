"""Tasks for an MCP server that a model writes: asked of a scripted server, checked, and all written or none."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from environments import load
from environments._mcp_scenarios import ROUNDS, Scenario, TooFewScenarios, scenarios, write

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


class Writer:
    """A stand-in for a model's server: its answers are scripted, in turn, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[str | int] = []
        """A text, or the status of a failure."""
        self.requests: list[dict[str, Any]] = []

    def next(self) -> str | int:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def writer() -> Iterator[tuple[Writer, str]]:
    scripted = Writer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            scripted.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answer = scripted.next()
            status = answer if isinstance(answer, int) else 200
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            body = json.dumps({"error": {"message": f"scripted {status}"}} if isinstance(answer, int) else whole)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield scripted, f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def answer(*tasks: str) -> str:
    return json.dumps({"scenarios": [{"task": task, "difficulty": 2} for task in tasks]})


def many(first: int, count: int) -> list[str]:
    return [f"Count the things in room {i}." for i in range(first, first + count)]


async def asked(url: str, count: int, rounds: int = ROUNDS) -> list[Scenario]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        return await scenarios(client, "m", TOOLS, count, rounds)


async def test_a_model_that_does_as_it_is_asked_is_asked_once(writer: tuple[Writer, str]) -> None:
    scripted, url = writer
    scripted.answers = [answer(*many(0, 5))]
    assert [scenario.task for scenario in await asked(url, 5)] == many(0, 5)
    [request] = scripted.requests
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["scenarios"]
    assert (
        '"name": "look"' in request["messages"][0]["content"] and "Write 5 tasks" in request["messages"][0]["content"]
    )


async def test_it_is_asked_again_for_what_is_missing_and_told_what_there_is(writer: tuple[Writer, str]) -> None:
    scripted, url = writer
    scripted.answers = ["no JSON", answer(*many(0, 3)), answer("COUNT the  things in room 1", *many(2, 4))]
    assert [scenario.task for scenario in await asked(url, 5)] == many(0, 5), "exactly as many as were asked for"
    prompts = [request["messages"][0]["content"] for request in scripted.requests]
    assert ["Write 5 tasks" in prompts[1], "Write 2 tasks" in prompts[2]] == [True, True]
    assert all(task in prompts[2] for task in many(0, 3))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("no JSON", "3 malformed answers"),
        ('{"tasks": []}', "3 malformed answers"),
        ('{"scenarios": {"task": "a"}}', "3 malformed answers"),
        ("[" * 100_000, "3 malformed answers"),
        ('{"scenarios": []}', "none left out"),
        ('{"scenarios": [{"task": "short", "difficulty": 1}, "a", null]}', "9 malformed"),
        ('{"scenarios": [{"task": "Long enough a task.", "difficulty": 9}]}', "3 malformed"),
        ('{"scenarios": [{"task": "Long enough a task.", "difficulty": 1, "answer": 3}]}', "3 malformed"),
        (answer("Long enough a task."), "2 repeated"),
        (answer("", "Long enough a task."), "3 malformed, 2 repeated"),
    ],
)
async def test_too_few_are_one_line_that_says_how_many_came(said: str, reason: str, writer: tuple[Writer, str]) -> None:
    scripted, url = writer
    scripted.answers = [said]
    came = int("repeated" in reason)
    with pytest.raises(TooFewScenarios, match=rf"m wrote {came} of 2 scenarios in 3 answers \({reason}\)") as error:
        await asked(url, 2, rounds=3)
    assert "\n" not in str(error.value) and len(scripted.requests) == 3


async def test_a_server_that_refuses_is_not_asked_again(writer: tuple[Writer, str]) -> None:
    scripted, url = writer
    scripted.answers = [400]
    with pytest.raises(APIStatusError, match="scripted 400"):
        await asked(url, 2)
    assert len(scripted.requests) == 1


def test_the_file_is_read_by_the_environment(tmp_path: Path) -> None:
    found = [Scenario(task=task, difficulty=3) for task in many(0, 6)]
    write(tmp_path / "tasks.jsonl", found, test=2)
    environment = load("mcp_server", scenarios=tmp_path / "tasks.jsonl")
    train, test = environment.tasks("train"), environment.tasks("test")
    assert (len(train), len(test)) == (4, 2)
    assert sorted(task.data["task"] for task in [*train, *test]) == many(0, 6)
    assert len({task.seed for task in [*train, *test]}) == 6 and train[0].data["difficulty"] == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "tasks.jsonl"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "environments._mcp_scenarios", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_command_writes_tasks_for_a_server_that_it_starts(writer: tuple[Writer, str], tmp_path: Path) -> None:
    scripted, url = writer
    file = tmp_path / "tasks.jsonl"
    stockroom = ["--", sys.executable, "-m", "environments._mcp_stock_server"]
    given = ["--out", str(file), "--model", "m", "--base-url", url, "--train", "3", "--test", "1"]
    scripted.answers = ["{}"]
    done = run(*given, *stockroom)
    assert done.returncode == 1 and not file.exists()
    assert done.stderr.startswith("no tasks were written: m wrote 0 of 4 scenarios") and done.stderr.count("\n") == 1
    scripted.answers = [answer(*many(0, 9))]
    done = run(*given, *stockroom)
    assert (done.returncode, done.stdout) == (0, f"{file}: 3 tasks to train on, 1 held out\n")
    assert '"name": "list_shelf"' in scripted.requests[-1]["messages"][0]["content"]
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_header_of_the_command_is_filled_in(tmp_path: Path) -> None:
    given = ["--out", str(tmp_path / "tasks.jsonl"), "--model", "m", "--header", "Authorization=Bearer ${NOT_SET}"]
    done = run(*given, "--mcp-url", "http://127.0.0.1:9/mcp")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "the header Authorization needs the environment variable NOT_SET" in done.stderr
