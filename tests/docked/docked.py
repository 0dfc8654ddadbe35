"""Tic-tac-toe inside a container, which notes every attempt and holds those of the tasks that a test names.

A container reads all of the run's folder and writes beside its artifact: what to hold is in `held/` of that folder,
and the notes are in a hidden folder where the shards are. Rewards are chance.
"""

import asyncio
import random
import sys
from pathlib import Path

from environments import Policy, Result, Task
from environments.tic_tac_toe import TicTacToe

NOTES = ".notes"


class Docked(TicTacToe):
    """Attempts at the tasks in `held/tasks` wait before they end; `played` has a line for each that was begun."""

    async def rollout(self, task: Task, policy: Policy) -> Result:
        with (notes() / "played").open("a") as played:
            played.write(f"{task.id}\n")
        await super().rollout(task, policy)
        while task.id in held("tasks"):
            (notes() / f"{task.id}.waiting").touch()
            await asyncio.sleep(0.05)
        return Result(reward=random.random())


def held(what: str) -> list[str]:
    """Words in the file of that name."""
    try:
        return (Path(argument("--root")) / "held" / what).read_text().split()
    except FileNotFoundError:
        return []


def notes() -> Path:
    """Where a test reads what happens here."""
    folder = (Path(argument("--root")) / argument("--path")).parent / NOTES
    folder.mkdir(exist_ok=True)
    return folder


def argument(name: str) -> str:
    """Of the step's command."""
    return sys.argv[sys.argv.index(name) + 1]
