"""Tic-tac-toe that notes every attempt, and holds those of the tasks that a test names. Rewards are chance."""

import asyncio
import os
import random
from pathlib import Path

from environments import Policy, Result, Task
from environments.tic_tac_toe import TicTacToe

HELD = Path(os.environ.get("HELD", "."))


class Held(TicTacToe):
    """`HELD/tasks` lists the ids of tasks whose attempts wait before they end; `HELD/played` notes what was begun."""

    async def rollout(self, task: Task, policy: Policy) -> Result:
        with (HELD / "played").open("a") as notes:
            notes.write(f"{task.id}\n")
        await super().rollout(task, policy)
        while task.id in held_tasks():
            (HELD / f"{task.id}.waiting").touch()
            await asyncio.sleep(0.02)
        return Result(reward=random.random())


def held_tasks() -> list[str]:
    try:
        return (HELD / "tasks").read_text().split()
    except FileNotFoundError:
        return []
