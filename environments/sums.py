"""Small sums, with a second chance: the least that a model which can talk may learn from.

Asked: `7 + 5 =`, after three sums that are worked out in the conversation; after a wrong answer once more. The
reply's first number counts. Turns: at most 2.

Rewarded, by a rule of our own: 1 for the right number at once, 0.5 at the second try, 0 otherwise.
"""

import re
from collections.abc import Iterable, Sequence
from random import Random

from pydantic import Field

from environments.base import Environment, Message, Player, Policy, Result, Split, Task

SUM = re.compile(r"(\d+) \+ (\d+) =$")
NUMBER = re.compile(r"-?\d+")
WORKED = ((2, 3), (6, 2), (5, 4))
TRIES = 2
EVERY_FIFTH = 5
"""Of the pairs is held out."""


class Sums(Environment):
    """The sum of two numbers."""

    largest: int = Field(default=9, ge=4)
    """The largest number that is added."""

    def tasks(self, split: Split) -> Sequence[Task]:
        numbers = range(self.largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers if (a, b) not in WORKED]
        Random("sums").shuffle(pairs)
        held_out = split == "test"
        return [
            Task(id=f"{a}+{b}", data={"a": a, "b": b})
            for i, (a, b) in enumerate(pairs)
            if (i % EVERY_FIFTH == 0) == held_out
        ]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        a, b = task.data["a"], task.data["b"]
        messages = [*_worked(), _ask(f"{a} + {b} =")]
        for attempt in range(TRIES):
            reply = await policy.chat(messages)
            if first_number(reply["content"] or "") == a + b:
                return Result(reward=1 - attempt / TRIES, metrics={"right": 1.0, "tries": attempt + 1})
            messages += [
                {"role": "assistant", "content": reply["content"]},
                _ask(f"That is wrong. {a} + {b} ="),
            ]
        return Result(reward=0.0, metrics={"right": 0.0, "tries": TRIES})

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Right answers."""
        tasks = self.tasks("train")
        while True:
            a, b = random.choice(tasks).data.values()
            yield [*_worked(), _ask(f"{a} + {b} ="), {"role": "assistant", "content": str(a + b)}]

    def players(self) -> Sequence[Player]:
        return (
            Player("best", lambda messages, random: str(sum(asked(messages))), (1.0, 1.0)),
            Player("random", lambda messages, random: str(random.randint(0, 2 * self.largest)), (0.0, 0.3)),
            Player("worst", lambda messages, random: "no idea", (0.0, 0.0)),
        )


def first_number(reply: str) -> int | None:
    """The first integer in a reply."""
    found = NUMBER.search(reply)
    return int(found[0]) if found and len(found[0]) < 10 else None


def asked(messages: Sequence[Message]) -> tuple[int, int]:
    """The two numbers of the last question."""
    found = SUM.search(messages[-1]["content"])
    assert found
    return int(found[1]), int(found[2])


def _ask(question: str) -> Message:
    return {"role": "user", "content": question}


def _worked() -> list[Message]:
    return [
        message for a, b in WORKED for message in (_ask(f"{a} + {b} ="), {"role": "assistant", "content": str(a + b)})
    ]
