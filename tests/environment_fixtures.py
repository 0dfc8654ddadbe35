"""Plays an environment with scripted answers, without a model or a recorder.

What is said in Hermes' form, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, comes as a tool call, as from a
server with that parser. Agents that take an address talk to a server in a thread, one for all tests of a process.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

from environments import Environment, Message, Policy, Result, Task
from environments._tool_calls import tool_calls
from steps.agent.gateway import Gateway

Answer = Callable[[Sequence[Message]], str | None]
"""From the conversation so far to the assistant's text."""


def spoken(text: str | None) -> Message:
    """The assistant's message, with the calls in it parsed where all of them make sense."""
    calls = tool_calls({"content": text})
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    parsed = [{"id": call.id, "type": "function", "function": f} for call, f in zip(calls, functions, strict=True)]
    return {"role": "assistant", "content": None, "tool_calls": parsed}


@contextmanager
def played_by(answer: Answer) -> Iterator[Policy]:
    """A policy whose answers are scripted."""

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        json.dumps(request)  # What an agent asks must be sendable.
        message = spoken(answer(request["messages"]))
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "script", "choices": [choice]}

    with gateway().open(complete) as policy:
        yield policy


@cache
def gateway() -> Gateway:
    """Ends with the process."""
    loop, server = asyncio.new_event_loop(), Gateway("script")
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(timeout=10)


def play(environment: Environment, task: Task, answer: Answer) -> Result:
    """One attempt, to its end."""

    async def attempt() -> Result:
        with played_by(answer) as policy:
            return await asyncio.wait_for(environment.rollout(task, policy), timeout=30)

    return asyncio.run(attempt())


def in_turn(replies: Iterable[str | None]) -> Answer:
    """Answers these texts, one after the other, whatever is asked."""
    left = iter(replies)
    return lambda messages: next(left)


def mean_reward(environment: Environment, name: str, tasks: Sequence[Task]) -> float:
    """Of the environment's own player of that name."""
    [player] = [player for player in environment.players() if player.name == name]

    def answers(task: Task) -> Answer:
        random = Random(f"player/{task.id}")
        return lambda messages: player.act(messages, random)

    return fmean(play(environment, task, answers(task)).reward for task in tasks)
