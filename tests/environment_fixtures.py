"""Plays an environment with scripted answers, without a model or a recorder."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import fmean
from typing import Any

from environments import Environment, Message, Policy, Result, Task

Answer = Callable[[Sequence[Message]], str | None]
"""From the conversation so far to the assistant's text."""


def played_by(answer: Answer) -> Policy:
    """A policy whose answers are scripted."""

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        json.dumps(request)  # What an agent asks must be sendable.
        message = {"role": "assistant", "content": answer(request["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "script", "choices": [choice]}

    return Policy(complete, base_url="http://127.0.0.1:1/v1", api_key="none", model="script")


def play(environment: Environment, task: Task, answer: Answer) -> Result:
    """One attempt, to its end."""

    async def attempt() -> Result:
        return await asyncio.wait_for(environment.rollout(task, played_by(answer)), timeout=30)

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
