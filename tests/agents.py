"""Agents for tests: one that talks, one that calls a tool, and one for each way to misbehave."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from environments import Environment, Message, Policy, Result, Split, Task

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
    }
]
CALL = '<tool_call>{"name": "look_up", "arguments": "{\\"key\\": \\"a\\"}"}</tool_call>'
tries: Counter[str] = Counter()


class Talk(Environment):
    """Says the task's id `turns` times; worth the length of the last answer."""

    turns: int = 3
    count: int = 4

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}") for i in range(self.count)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        messages: list[Message] = []
        for turn in range(self.turns):
            messages.append({"role": "user", "content": f"{task.id}: turn {turn}"})
            messages.append(await policy.chat(messages))
        return Result(reward=len(messages[-1]["content"]), metrics={"turns": self.turns})


class Bends(Talk):
    """Asks for a narrower distribution."""

    async def rollout(self, task: Task, policy: Policy) -> Result:
        await policy.chat([{"role": "user", "content": "hi"}], top_p=0.5)
        return Result(reward=1)


async def use_tool(ask: Any) -> list[Message]:
    """Two turns, the first of which a model that plays along answers with a tool call."""
    messages: list[Message] = [{"role": "user", "content": "What is a?"}]
    reply = await ask(messages=messages, tools=TOOLS)
    messages.append(reply)
    for call in reply.get("tool_calls") or []:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a is 1"})
    messages.append(await ask(messages=messages, tools=TOOLS))
    return messages


async def use_tool_by_chat(policy: Policy) -> list[Message]:
    async def ask(messages: list[Message], **more: Any) -> Message:
        return _sent(await policy.chat(messages, **more))

    return await use_tool(ask)


async def use_tool_by_client(client: AsyncOpenAI, model: str) -> list[Message]:
    async def ask(**request: Any) -> Message:
        response = await client.chat.completions.create(model=model, **request)
        return _sent(response.choices[0].message.model_dump(exclude_none=True))

    return await use_tool(ask)


def _sent(message: Message) -> Message:
    return {key: value for key, value in message.items() if key in ("role", "content", "tool_calls") and value}


async def raises(task: Task, policy: Policy) -> Result:
    await policy.chat([{"role": "user", "content": "hi"}])
    raise LookupError(f"no such shelf\nin {task.data.get('shelf', 'here')}")


async def hangs(task: Task, policy: Policy) -> Result:
    await asyncio.sleep(3600)
    raise AssertionError


async def will_not_stop(task: Task, policy: Policy) -> Result:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def returns_nothing(task: Task, policy: Policy) -> None:
    await policy.chat([{"role": "user", "content": "hi"}])


async def has_its_reward_posted(task: Task, policy: Policy) -> None:
    """As an agent elsewhere would, that was given the address."""
    headers = {"Authorization": f"Bearer {policy.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        (await session.post(f"{policy.base_url}/reward", json={"reward": 2})).raise_for_status()


async def returns_nan(task: Task, policy: Policy) -> float:
    return math.nan


async def returns_infinity(task: Task, policy: Policy) -> float:
    return math.inf


async def returns_text(task: Task, policy: Policy) -> str:
    return "a good one"


async def measures_nan(task: Task, policy: Policy) -> Result:
    return Result(reward=1, metrics={"speed": math.nan})


async def exits(task: Task, policy: Policy) -> Result:
    sys.exit(0)


async def cancels_itself(task: Task, policy: Policy) -> Result:
    raise asyncio.CancelledError


async def swallows_everything(task: Task, policy: Policy) -> float:
    try:
        await policy.chat([{"role": "user", "content": "hi"}])
    except Exception:
        return 1.0
    return 0.0


async def fails_once(task: Task, policy: Policy) -> float:
    await policy.chat([{"role": "user", "content": "hi"}])
    tries[task.id] += 1
    if tries[task.id] == 1:
        raise LookupError("not yet")
    return 1.0


async def talks_to_itself(task: Task, policy: Policy) -> float:
    """Leaves a task behind that goes on asking."""

    async def go_on() -> None:
        while True:
            await policy.chat([{"role": "user", "content": "and then?"}])

    tries[task.id] = 0
    running.append(asyncio.create_task(go_on()))
    await asyncio.sleep(0.05)
    return 1.0


running: list[asyncio.Task[None]] = []


class NotOne(Environment):
    """An environment whose rollout returns no Result."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}") for i in range(4)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        return None  # type: ignore[return-value]
