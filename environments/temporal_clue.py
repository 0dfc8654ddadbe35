"""Temporal Clue: who did it, with what, where, when and why, by deduction.

Asked: a puzzle, in one message. Each of some suspects came at a time of his or her own, to another room, with another
weapon, for another motive, and one of them is the murderer. Clues relate these: "Ada is not the one with the rope",
"The one in the attic came right before the murderer", "Bruno is either the one at 20:00 or the one moved by envy". The
reply ends with a line for each of five questions, `A. Ada`; the last line of a letter counts, capitals do not matter.

Rewarded, as in OpenPipe ART's example (examples/temporal_clue): (questions answered right) / 5. Turns: 1.

The puzzles are made here, of the task's seed: a SAT solver proves that each has one answer, and that no clue can be
left out. They get harder with the number of suspects, and without clues that say outright what belongs together.
"""

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Annotated

from pydantic import Field, PositiveInt

from environments._clue_puzzles import Puzzle, make_puzzle, read, write
from environments._clue_solver import answer, solution
from environments.base import Environment, Message, Player, Policy, Result, Split, Task

TEST_SEEDS = 1_000_000_000
QUESTIONS = {"A": "suspect", "B": "weapon", "C": "room", "D": "time", "E": "motive"}
RULES = (
    "Mr. Gale had visitors one day, each at another time, in another room, with another weapon, for another motive. "
    "One of them is the murderer. End your reply with five lines about the murderer, like:\n"
    + "\n".join(f"{letter}. {category}" for letter, category in QUESTIONS.items())
)


class TemporalClue(Environment):
    """Puzzles with one answer."""

    suspects: Annotated[int, Field(ge=2, le=8)] = 3
    """And as many weapons, rooms, times and motives."""
    direct_clues: bool = True
    """Whether clues may say outright what belongs together; without, they only exclude, order, or leave two choices."""
    train_tasks: PositiveInt = 8192
    """Tasks to train on."""
    test_tasks: PositiveInt = 256
    """Held-out tasks."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    def puzzle(self, seed: int) -> Puzzle:
        """A task's puzzle: milliseconds for up to 4 suspects, 50 for 8."""
        return make_puzzle(seed, self.suspects, self.direct_clues)

    async def rollout(self, task: Task, policy: Policy) -> Result:
        puzzle = self.puzzle(task.seed)
        reply = await policy.chat(_question(puzzle))
        right = grade(reply["content"] or "", puzzle.answer)
        return Result(reward=right / len(QUESTIONS), metrics={"right": right, "solved": float(right == len(QUESTIONS))})

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Puzzles with their answers, without the thinking between."""
        while True:
            puzzle = self.puzzle(random.randrange(TEST_SEEDS))
            yield [*_question(puzzle), {"role": "assistant", "content": in_lines(puzzle.answer)}]

    def players(self) -> Sequence[Player]:
        chance = 1 / self.suspects
        return (
            Player("best", lambda messages, random: deduced(messages), (1.0, 1.0)),
            Player("random", guessed, (chance - 0.08, chance + 0.08)),
            Player("worst", lambda messages, random: "A. nobody", (0.0, 0.0)),
        )


def grade(reply: str, truth: dict[str, str]) -> int:
    """How many questions the reply answers right."""
    return sum(given(reply, letter) == truth[category].lower() for letter, category in QUESTIONS.items())


def given(reply: str, letter: str) -> str | None:
    """What the reply's last line for a question says, in small letters."""
    lines = re.findall(rf"^[ \t]*{letter}\.[ \t]+(.*\S)", reply, re.MULTILINE | re.IGNORECASE)
    return lines[-1].lower() if lines else None


def in_lines(answers: dict[str, str]) -> str:
    """Answers as they are asked for."""
    return "\n".join(f"{letter}. {answers[category]}" for letter, category in QUESTIONS.items())


def deduced(messages: Sequence[Message]) -> str:
    """The answer that follows from the text of a puzzle."""
    categories, clues = read(str(messages[-1]["content"]))
    times = solution(categories, clues)
    return in_lines(answer(categories, times)) if times else ""


def guessed(messages: Sequence[Message], random: Random) -> str:
    """Any of the listed names for each question."""
    categories, _ = read(str(messages[-1]["content"]))
    return in_lines({category: random.choice(names) for category, names in categories.items()})


def _question(puzzle: Puzzle) -> list[Message]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": write(puzzle)}]
