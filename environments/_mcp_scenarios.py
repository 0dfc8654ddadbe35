"""Has a model write tasks for an MCP server from the list of its tools, as a file that `mcp_server` reads.

    python -m environments._mcp_scenarios --out tasks.jsonl --train 16 --test 8 --model gpt-… -- npx -y some-server
    python -m environments._mcp_scenarios --out tasks.jsonl --model … --base-url http://…/v1 --mcp-url http://…/mcp

Any OpenAI-compatible server that takes a JSON schema will do. Answers are checked against the schema, what is malformed
or said twice is left out, and the model is asked again for the rest, a bounded number of times. Either all tasks that
were asked for are written, or none.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

from openai import AsyncOpenAI, OpenAIError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from environments._mcp_client import Address, Command, ServerFailed, connected

ROUNDS = 6
"""Requests, at most."""
TIMEOUT = 120.0
"""Seconds for one answer of the model."""
PROMPT = """\
An agent has the tools below. Write {count} tasks for it: what a user of this server would really ask for, each possible
with these tools alone, from easy (one call) to hard (several calls that build on each other). Say all that the agent
must know, such as names and numbers; don't name the tools. Answer with JSON.

{tools}"""
AGAIN = "\n\nThere are these already; write others:\n"


class Scenario(BaseModel):
    """One task."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    task: Annotated[str, Field(min_length=10, max_length=2000)]
    difficulty: Annotated[int, Field(ge=1, le=5)]


class TooFewScenarios(Exception):
    """The model did not write as many as were asked for. The message says how many came."""


async def scenarios(
    client: AsyncOpenAI, model: str, tools: Sequence[dict[str, Any]], count: int, rounds: int = ROUNDS
) -> list[Scenario]:
    """Exactly `count` different tasks. Raises `TooFewScenarios` after `rounds` requests, `OpenAIError`."""
    found: dict[str, Scenario] = {}
    left_out: Counter[str] = Counter()
    for _ in range(rounds):
        answer = await _ask(client, model, tools, count - len(found), found.values())
        for scenario in _read(answer, left_out):
            if _key(scenario) in found:
                left_out["repeated"] += 1
            else:
                found[_key(scenario)] = scenario
        if len(found) >= count:
            return list(found.values())[:count]
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(left_out.items()))
    raise TooFewScenarios(
        f"{model} wrote {len(found)} of {count} scenarios in {rounds} answers ({reasons or 'none left out'}): "
        f"ask for fewer, or another model"
    )


def write(file: Path, found: Sequence[Scenario], test: int) -> None:
    """Writes the tasks, `test` of them to be held out; all or nothing."""
    order = list(range(len(found)))
    Random(0).shuffle(order)
    held_out = set(order[:test])
    rows = [
        {"id": f"scenario-{i}", "seed": i, "split": "test" if i in held_out else "train", **scenario.model_dump()}
        for i, scenario in enumerate(found)
    ]
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    unfinished.replace(file)


async def _ask(
    client: AsyncOpenAI, model: str, tools: Sequence[dict[str, Any]], count: int, known: Collection[Scenario]
) -> str:
    text = PROMPT.format(count=count, tools=json.dumps([tool["function"] for tool in tools], ensure_ascii=False))
    if known:
        text += AGAIN + "\n".join(scenario.task for scenario in known)
    response = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "scenarios", "strict": True, "schema": _schema()},
        },
    )
    return response.choices[0].message.content or ""


def _read(answer: str, left_out: Counter[str]) -> list[Scenario]:
    """What of an answer is a scenario; the rest is counted."""
    try:
        items = json.loads(answer)["scenarios"]
    except (ValueError, KeyError, TypeError, RecursionError):
        items = None
    if not isinstance(items, list):
        left_out["malformed answers"] += 1
        return []
    found = []
    for item in items:
        try:
            found.append(Scenario.model_validate(item))
        except ValidationError:
            left_out["malformed"] += 1
    return found


def _schema() -> dict[str, Any]:
    # Without lengths and bounds, which not every server takes: they are checked here.
    item = {
        "type": "object",
        "properties": {"task": {"type": "string"}, "difficulty": {"type": "integer"}},
        "required": ["task", "difficulty"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"scenarios": {"type": "array", "items": item}},
        "required": ["scenarios"],
        "additionalProperties": False,
    }


def _key(scenario: Scenario) -> str:
    """Equal where only capitals, space and punctuation differ."""
    return " ".join("".join(c if c.isalnum() else " " for c in scenario.task.casefold()).split())


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("write it as NAME=VALUE")
    return name, value


async def _main(arguments: argparse.Namespace) -> None:
    target = (
        Address(arguments.mcp_url, dict(arguments.header))
        if arguments.mcp_url
        else Command(arguments.command, arguments.forward)
    )
    key = os.environ.get(arguments.key_variable, "none")
    async with (
        connected(target, startup_timeout=TIMEOUT, call_timeout=TIMEOUT) as session,
        AsyncOpenAI(base_url=arguments.base_url, api_key=key, timeout=TIMEOUT) as client,
    ):
        found = await scenarios(client, arguments.model, session.tools, arguments.train + arguments.test)
    write(arguments.out, found, arguments.test)
    print(f"{arguments.out}: {arguments.train} tasks to train on, {arguments.test} held out")


def main() -> None:
    """Writes the file, or says in one line why not and exits with 1."""
    parser = argparse.ArgumentParser(description="Have a model write tasks for an MCP server.")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--model", required=True)
    parser.add_argument("--base-url", help="of the model's server; else OpenAI's")
    parser.add_argument("--key-variable", default="OPENAI_API_KEY", help="the environment variable with its key")
    parser.add_argument("--train", type=int, default=16, help="tasks to train on")
    parser.add_argument("--test", type=int, default=8, help="tasks to hold out")
    parser.add_argument("--mcp-url", help="of the MCP server, where it speaks streamable HTTP")
    parser.add_argument(
        "--header", action="append", default=[], type=_header, help="NAME=VALUE for --mcp-url; ${NAME} is a variable"
    )
    parser.add_argument("--forward", action="append", default=[], help="an environment variable the command gets")
    parser.add_argument("command", nargs="*", help="starts the MCP server, where it speaks on stdio")
    arguments = parser.parse_args()
    if bool(arguments.mcp_url) == bool(arguments.command):
        parser.error("name the MCP server: a command after --, or --mcp-url")
    if arguments.header and not arguments.mcp_url:
        parser.error("--header goes with --mcp-url")
    if arguments.train < 1 or arguments.test < 1:
        parser.error("--train and --test must be at least 1: a run needs both")
    try:
        asyncio.run(_main(arguments))
    except (TooFewScenarios, ServerFailed, OpenAIError, OSError) as error:
        print(f"no tasks were written: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
