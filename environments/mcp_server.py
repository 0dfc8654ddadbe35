"""Tasks for the tools of an MCP server: a small stockroom that comes with the project, or any server you name.

Asked: the system message says to work with the tools and to call `complete_task` with the answer; a user message has
the task, such as "Move 2 nails from shelf A to shelf C". Each reply calls tools; their answers, and their errors, come
back. A reply that calls none ends the attempt. Turns: at most `max_turns`.

In the stockroom four kinds of task are rewarded by a program, with a formula of our own. With s = 1 where the answer is
right and the stock is as it should be, else 0; e tool calls that failed, at most T; t turns used of T:

    s (1 + 0.1 (1 - t / T)) - 0.05 e        where complete_task was called
    -1 - 0.05 e                             where it was not

A server of your own is named by `command` (stdio; a process for each rollout) or `url` (streamable HTTP). `scenarios`
is a JSONL file of tasks for it, `{"id": …, "split": …, "task": "…"}`; `python -m environments._mcp_scenarios` has a
model write one. The reward is `reward`'s, an `async def grade(task, attempt)` returning a number or a `Result`, or else
1 where complete_task was called, 0 where not: then have a judge rank each group's attempts (`[group.judge]`), as
OpenPipe ART's MCP example does, from which complete_task and the bound on a tool's answer (20,000 characters) are too.

`{seed}` in `command` and `url` stands for the task's seed, so that a server may start each attempt of a group alike.

It needs the package `mcp`, of the extra `agents`, where rollouts run.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from environments._mcp_stock import ITEMS, KINDS, STATE, TOOLS, Kind, Problem, Stock, next_call
from environments._tasks_file import read_tasks
from environments._tool_calls import ToolCall, as_text, calling, told, tool_calls
from environments.base import Environment, Message, Player, Policy, Result, Split, Task, UnknownEnvironment

if TYPE_CHECKING:
    from environments._mcp_client import Session, ToolResult

TEST_SEEDS = 1_000_000_000
SPEED, ERROR, UNFINISHED = 0.1, 0.05, -1.0
RULES = "Work on the task with the tools. When it is done, call complete_task with the answer."
COMPLETE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "complete_task",
        "description": "Ends the task.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}


@dataclass
class Attempt:
    """What the agent did, for whoever rewards it."""

    messages: list[Message]
    session: "Session"
    """Still connected: `session.call` and `session.read` tell what became of the server's world."""
    answer: str | None = None
    """Given to complete_task; None where it was not called."""
    turns: int = 0
    errors: int = 0
    """Tool calls that failed, or that could not be made."""

    async def make(self, call: ToolCall) -> None:
        """Makes one call and appends its answer."""
        if call.name == "complete_task" and isinstance(call.arguments.get("answer"), str):
            self.answer = call.arguments["answer"]
            return
        result = await self._result(call)
        self.errors += result.failed
        text = f"error: {result.text}" if result.failed else result.text
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def _result(self, call: ToolCall) -> "ToolResult":
        from environments._mcp_client import ToolResult

        if call.problem:
            return ToolResult(call.problem, failed=True)
        if call.name == "complete_task":
            return ToolResult("complete_task needs the answer, as a string", failed=True)
        return await self.session.call(call.name, call.arguments)


class McpServer(Environment):
    """An agent with the tools of an MCP server."""

    command: tuple[str, ...] = ()
    """Starts a server that speaks MCP on stdio, for each rollout. Without this and `url`: the stockroom, without a
    process of its own."""
    url: str | None = None
    """Of a server that speaks MCP over streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent to the URL with each request. `${NAME}` stands for an environment variable where rollouts run, so that no
    secret is in a file: `{ Authorization = "Bearer ${TOKEN}" }`."""
    forwarded: tuple[str, ...] = ()
    """Names of environment variables that the command gets, besides PATH, HOME and the like."""
    scenarios: Path | None = None
    """JSONL: a task a line, `{"id": …, "split": "train" | "test", "task": "…"}`; without it: about the stockroom."""
    reward: str | None = None
    """`package.module:function`, an `async def grade(task, attempt)`; without it: as told above."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = KINDS
    """Of tasks about the stockroom: how many there are, what they are worth, to move some, to clear a shelf."""
    tool_calls: Literal["native", "text"] = "native"
    """How the model is told of tools and calls them: by its chat template and the server's parser
    (`serve.tool_call_parser`), or in the text of the messages, for models whose template has no tools."""
    max_turns: PositiveInt = 10
    """After them the attempt ends."""
    startup_timeout: PositiveFloat = 60.0
    """Seconds until a server has listed its tools."""
    call_timeout: PositiveFloat = 30.0
    """Seconds for a tool's answer; after them the call counts as failed."""
    train_tasks: PositiveInt = 8192
    """Tasks to train on, about the stockroom."""
    test_tasks: PositiveInt = 64
    """Held-out tasks, about the stockroom."""

    @field_validator("reward")
    @classmethod
    def _names_a_function(cls, reward: str | None) -> str | None:
        if reward is not None and not inspect.iscoroutinefunction(_function_at(reward)):
            raise ValueError("must be package.module:function, of an async function")
        return reward

    @model_validator(mode="after")
    def _server_has_tasks(self) -> Self:
        if self.command and self.url:
            raise ValueError("a server has a command or a url, not both")
        if self.headers and not self.url:
            raise ValueError("`headers` go with a url")
        if (self.command or self.url) and not self.scenarios:
            raise ValueError("a server of your own needs `scenarios`, a file of tasks")
        return self

    def tasks(self, split: Split) -> Sequence[Task]:
        if self.scenarios:
            return [_with_text(task, self.scenarios) for task in read_tasks(self.scenarios, split)]
        first, number = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [self._task(f"{split}-{i}", first + i) for i in range(number)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        client = _client_module()
        async with client.connected(self._target(task), self.startup_timeout, self.call_timeout) as session:
            attempt = Attempt(self._opening(task.data["task"], session.tools), session)
            await self._play(attempt, policy)
            return self._with_metrics(await self._graded(task, attempt), attempt)

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """How a good agent works in the stockroom."""
        while True:
            task = self._task("", random.randrange(TEST_SEEDS))
            messages, stock = self._opening(task.data["task"], stock_tools()), Stock.of_seed(task.seed)
            for number in count():
                name, arguments = next_call(messages)
                messages.append(calling(number, name, arguments, native=self.tool_calls == "native"))
                if name == "complete_task":
                    break
                result = stock.call(name, arguments)
                messages.append({"role": "tool", "tool_call_id": f"call-{number}", "content": result})
            yield messages

    def demonstrated_tools(self) -> Sequence[dict[str, Any]]:
        return [*stock_tools(), COMPLETE] if self.tool_calls == "native" else ()

    def players(self) -> Sequence[Player]:
        return (
            Player("best", lambda messages, random: as_text(*next_call(messages)), (1.0, 1.1)),
            Player("random", at_random, (-0.2, 0.3)),
            Player("worst", lambda messages, random: "I don't know.", (UNFINISHED, UNFINISHED)),
        )

    def _task(self, name: str, seed: int) -> Task:
        return Task(id=name, seed=seed, data={"task": Problem(seed, self.kinds).text})

    def _target(self, task: Task) -> Any:
        if self.command:
            arguments = [part.replace("{seed}", str(task.seed)) for part in self.command]
            return _client_module().Command(arguments, self.forwarded)
        if self.url:
            return _client_module().Address(self.url.replace("{seed}", str(task.seed)), self.headers)
        return importlib.import_module("environments._mcp_stock_server").stock_server(Stock.of_seed(task.seed))

    def _opening(self, request: str, tools: Sequence[dict[str, Any]]) -> list[Message]:
        rules = RULES if self.tool_calls == "native" else f"{RULES}\n{told([*tools, COMPLETE])}"
        return [{"role": "system", "content": rules}, {"role": "user", "content": request}]

    async def _play(self, attempt: Attempt, policy: Policy) -> None:
        tools = {"tools": [*attempt.session.tools, COMPLETE]} if self.tool_calls == "native" else {}
        while attempt.answer is None and attempt.turns < self.max_turns:
            reply = await policy.chat(attempt.messages, **tools)
            attempt.turns += 1
            attempt.messages.append({key: reply[key] for key in ("role", "content", "tool_calls") if reply.get(key)})
            calls = tool_calls(reply)
            for call in calls:
                if attempt.answer is None:
                    await attempt.make(call)
            if not calls:
                break

    async def _graded(self, task: Task, attempt: Attempt) -> Result:
        if self.reward:
            graded = await _function_at(self.reward)(task, attempt)
            return graded if isinstance(graded, Result) else Result(reward=graded)
        if self.scenarios:
            return Result(reward=float(attempt.answer is not None))
        return await self._stock_reward(task, attempt)

    async def _stock_reward(self, task: Task, attempt: Attempt) -> Result:
        problem = Problem(task.seed, self.kinds)
        right = _same(attempt.answer, problem.answer) and await attempt.session.read(STATE) == problem.state
        completed = attempt.answer is not None
        errors = min(attempt.errors, self.max_turns)  # a reply may hold many calls
        reward = worth(right, completed, errors, attempt.turns / self.max_turns)
        return Result(reward=reward, metrics={"solved": float(right)}, metadata={"kind": problem.kind})

    def _with_metrics(self, result: Result, attempt: Attempt) -> Result:
        completed = attempt.answer is not None
        metrics = {"turns": attempt.turns, "tool_errors": attempt.errors, "completed": float(completed)}
        return Result(reward=result.reward, metrics=metrics | result.metrics, metadata=result.metadata)


def worth(solved: bool, completed: bool, errors: int, turns: float) -> float:
    """The reward in the stockroom; `turns` is the used share of those allowed."""
    base = solved * (1 + SPEED * (1 - turns)) if completed else UNFINISHED
    return base - ERROR * errors


def at_random(messages: Sequence[Message], random: Random) -> str:
    """Looks up something, or answers something."""
    if random.random() < 0.5:
        return as_text("find", {"item": random.choice([*ITEMS, "gold"])})
    return as_text("complete_task", {"answer": random.choice(["done", *map(str, range(1, 10))])})


def _same(given: str | None, right: str) -> bool:
    """Capitals, space and a full stop at the end don't matter."""
    return given is not None and given.strip().rstrip(".").lower() == right


def _with_text(task: Task, file: Path) -> Task:
    if not isinstance(task.data.get("task"), str):
        raise UnknownEnvironment(f"{file}: the task {task.id!r} has no text in the field `task`")
    return task


def stock_tools() -> list[dict[str, Any]]:
    """The stockroom's tools, as OpenAI's API has them."""
    return [{"type": "function", "function": _function(tool)} for tool in TOOLS]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}


def _function_at(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None) if name else None
    except ImportError as error:
        raise ValueError(f"can't be imported: {error}") from None


def _client_module() -> Any:
    if importlib.util.find_spec("mcp") is None:
        raise UnknownEnvironment("mcp_server needs the package `mcp`: install nightschool[agents]")
    return importlib.import_module("environments._mcp_client")
