"""A table of what the judge said, a row for each attempt."""

import asyncio
from pathlib import Path

import polars as pl

from steps.common import tables
from steps.common.artifacts import Usage
from steps.judge.ledger import Ledger
from steps.judge.ruler import Ruling, rule
from steps.judge.settings import JudgeSettings


def judged(
    played: pl.DataFrame, settings: JudgeSettings, min_attempts: int | None, folder: Path
) -> tuple[pl.DataFrame, Usage]:
    """`JUDGEMENT_COLUMNS` for the trajectories in `played`, in their order, and what that took, now or earlier.

    Answers are kept in `folder`. Raises as `rule` does.
    """
    groups = tables.groups_of_frame(played)
    rulings = asyncio.run(rule(groups, settings, min_attempts, Ledger(folder, settings)))
    rows = pl.DataFrame([row for ruling in rulings for row in _rows(ruling)], schema=_SAID)
    own = played.select("iteration", "task_id", "attempt", own_reward="reward")
    judgements = own.join(rows, on=["task_id", "attempt"], how="left", maintain_order="left")
    answers = {answer.request: answer for ruling in rulings for answer in ruling.answers}
    used = sum((answer.usage for answer in answers.values()), Usage())
    return judgements.select(tables.JUDGEMENT_COLUMNS.keys()), used


_SAID = {name: kind for name, kind in tables.JUDGEMENT_COLUMNS.items() if name not in ("iteration", "own_reward")}


def _rows(ruling: Ruling) -> list[dict[str, object]]:
    rows = []
    for trajectory in ruling.group.trajectories:
        verdict = ruling.verdicts.get(trajectory.attempt)
        rows.append(
            {
                "task_id": trajectory.task_id,
                "attempt": trajectory.attempt,
                "score": verdict and verdict.score,
                "explanation": verdict and verdict.explanation,
                "dropped": ruling.dropped,
            }
        )
    return rows
