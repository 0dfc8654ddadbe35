"""Tic-tac-toe that is worth more by as much as a file says: how a night is made good or bad at will."""

import os
from pathlib import Path

from environments import Policy, Result, Task
from environments.tic_tac_toe import TicTacToe


class Graded(TicTacToe):
    """Adds the number in the file GRADE to each reward; 0 where there is no such file."""

    async def rollout(self, task: Task, policy: Policy) -> Result:
        result = await super().rollout(task, policy)
        grade = Path(os.environ["GRADE"])
        extra = float(grade.read_text()) if grade.exists() else 0.0
        return result.model_copy(update={"reward": (result.reward or 0.0) + extra})
