"""A conversation of fixed shape, played through the recorder and by hand, so that the two can be compared."""

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import aiohttp

from environments import Environment, Message, Policy, Result, Split, Task

TURNS = 4
SAMPLED = {"max_tokens": 2, "ignore_eos": True}
CELLS = [f"{column}{row}" for row in "123" for column in "abc"]
SYSTEM = "You play X in tic-tac-toe. Reply with one free cell."


def opening() -> list[Message]:
    """What a conversation begins with."""
    return [{"role": "system", "content": SYSTEM}]


def board(task: Task, turn: int) -> Message:
    """What the agent says in a turn, whatever was answered before."""
    random = Random(f"{task.id}/{turn}")
    cells = [random.choice([cell, "X", "O"]) for cell in CELLS]
    return {"role": "user", "content": "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))}


class Game(Environment):
    """Tic-tac-toe's prompts and lengths, without its rules: every attempt has the same number of turns."""

    count: int = 256

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}") for i in range(self.count)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        messages = opening()
        for turn in range(TURNS):
            messages.append(board(task, turn))
            reply = await policy.chat(messages, **SAMPLED)
            messages.append({"role": "assistant", "content": reply["content"]})
        return Result(reward=1.0)


async def play_by_hand(url: str, key: str, model: str, tasks: Sequence[Task], attempts: int, concurrency: int) -> None:
    """The same requests from a bare client, whose answers are read and thrown away."""
    slots = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def attempt(task: Task, number: int) -> None:
            messages = opening()
            async with slots:
                for turn in range(TURNS):
                    messages.append(board(task, turn))
                    seed = Random(f"{task.id}/{number}/{turn}").getrandbits(31)
                    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0.7, "seed": seed}
                    body |= {**SAMPLED, "logprobs": True, "return_token_ids": True}
                    async with session.post(f"{url}/chat/completions", data=json.dumps(body)) as response:
                        answer = await response.json()
                    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

        await asyncio.gather(*(attempt(task, number) for task in tasks for number in range(attempts)))
