"""Rollouts → Groups: scores each group, and keeps it for training or drops it with a stated reason.

A group teaches by comparison, so one whose attempts are all worth the same has nothing to say (`zero_variance`), and
one with attempts missing compares the survivors only (`short_group`). Dropping zero-variance groups also takes their
tokens out of the denominators of token-averaged losses: the same sum over fewer tokens, a somewhat larger step.

Where a judge is set (`steps.judge`), its scores are the rewards; what the attempts themselves were worth stays in the
rollouts, and beside the judge's word in `judgements.parquet`.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import duckdb
import polars as pl
from pydantic import Field

from environments import Environment, TrajectoryGroup
from steps.common import layout, tables
from steps.common.artifacts import Groups, Record, Rollouts
from steps.common.errors import NightschoolError
from steps.common.settings import EnvironmentSettings
from steps.common.step import Inputs, Step, Workspace
from steps.judge.settings import JudgeSettings, price_of

SIFTED = """
    WITH spread AS (
        SELECT task_id, count(*) AS attempts, count(reward) AS present,
               avg(reward) AS group_mean, stddev_samp(reward) AS group_std,
               max(reward) - min(reward) <= 1e-12 AS flat
        FROM scored GROUP BY task_id
    )
    SELECT *, reason IS NULL AS kept FROM (
        SELECT iteration, task_id, attempt, shard, reward, group_mean, group_std, position,
               CASE WHEN failure_type IS NOT NULL THEN 'failed'
                    WHEN unjudged IS NOT NULL THEN unjudged
                    WHEN reward IS NULL THEN 'unscored'
                    WHEN present < coalesce($min_attempts, attempts) OR present < 2 THEN 'short_group'
                    WHEN flat AND $drop_zero_variance THEN 'zero_variance' END AS reason
        FROM scored JOIN spread USING (task_id)
    ) ORDER BY position
"""

OF_GROUPS = ("short_group", "zero_variance", "identical", "judge_failed")
"""Reasons that concern a whole group."""


class GroupSettings(Record):
    """Which groups are worth training on."""

    min_attempts: int | None = None
    """Scored attempts a group needs; without it all of them, since a group without its failures is a biased sample."""
    drop_zero_variance: bool = True
    """Drop groups whose attempts all have the same reward."""
    score_timeout: float = 600.0
    """Seconds that the environment's `score` may take for one group."""
    judge: JudgeSettings | None = Field(None, exclude_if=lambda judge: judge is None)
    """RULER: a model that scores the attempts of a group by comparing them, in the place of the environment."""


class GroupInputs(Inputs):
    """An iteration's rollouts."""

    iteration: int
    rollouts: list[Rollouts]
    environment: EnvironmentSettings
    settings: GroupSettings = GroupSettings()

    def identity(self) -> dict[str, Any]:
        """Without where the judge is and what it may cost."""
        return self.model_dump(mode="json", exclude={"settings": {"judge": set(JudgeSettings.operational)}})


def group(inputs: GroupInputs, workspace: Workspace) -> dict[str, Any]:
    """Scores, joins and filters an iteration's rollouts."""
    files = [workspace.root / shard.path / tables.TRAJECTORIES for shard in inputs.rollouts]
    played = tables.read(files, tables.TRAJECTORY_COLUMNS)
    scored, more = _judged(played, inputs.settings, workspace) if inputs.settings.judge else _scored(played, inputs)
    sifted = _sift(scored, inputs.settings)
    tables.write(sifted.select(tables.GROUP_COLUMNS.keys()), workspace.out / tables.GROUPS)
    return {**_facts(inputs, played, sifted), **more}


def _scored(played: pl.DataFrame, inputs: GroupInputs) -> tuple[pl.DataFrame, dict[str, Any]]:
    return played.with_columns(reward=_rewards(played, inputs), unjudged=pl.lit(None, pl.String)), {}


def _judged(played: pl.DataFrame, settings: GroupSettings, workspace: Workspace) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The attempts with the judge's scores, or with the reason why their group has none; and what that took."""
    from steps.judge.table import judged  # the client takes a second to import

    assert settings.judge
    judgements, used = judged(played, settings.judge, settings.min_attempts, workspace.root / layout.JUDGE)
    tables.write(judgements, workspace.out / tables.JUDGEMENTS)
    workspace.measured["judge_price"] = price_of(used, settings.judge.prices)
    said = judgements.select("task_id", "attempt", reward="score", unjudged="dropped")
    scored = played.drop("reward").join(said, on=["task_id", "attempt"], how="left", maintain_order="left")
    return scored, {"judge": used.model_dump()}


def _sift(scored: pl.DataFrame, settings: GroupSettings) -> pl.DataFrame:
    parameters = settings.model_dump(include={"min_attempts", "drop_zero_variance"})
    with duckdb.connect() as connection:
        connection.register("scored", scored.drop("sequences", "messages").with_row_index("position"))
        sifted: pl.DataFrame = connection.sql(SIFTED, params=parameters).pl()
    return sifted.select(pl.col(name).cast(kind) for name, kind in tables.GROUP_COLUMNS.items())


def _rewards(played: pl.DataFrame, inputs: GroupInputs) -> pl.Series:
    """The attempts' own rewards, or the environment's for the whole group where it has a `score`."""
    environment = inputs.environment.load()
    if type(environment).score is Environment.score:
        return played["reward"]
    rewards: dict[tuple[str, int], float | None] = {}
    for played_group in tables.groups_of_frame(played):
        scores = asyncio.run(_score(environment, played_group, inputs.settings.score_timeout))
        for trajectory, score in zip(played_group.trajectories, scores, strict=True):
            rewards[trajectory.task_id, trajectory.attempt] = None if trajectory.failure else score
    keys = zip(played["task_id"], played["attempt"], strict=True)
    return pl.Series([rewards[key] for key in keys], dtype=pl.Float64)


async def _score(environment: Environment, played: TrajectoryGroup, timeout: float) -> Sequence[float | None]:
    try:
        scores = await asyncio.wait_for(environment.score(played), timeout)
    except TimeoutError:
        raise NightschoolError(f"scoring the group of task {played.task.id} took more than {timeout:g} s") from None
    if len(scores) != len(played.trajectories) or not all(s is None or math.isfinite(s) for s in scores):
        raise NightschoolError(
            f"score() of the environment must give {len(played.trajectories)} finite rewards or Nones "
            f"for task {played.task.id}, it gave {list(scores)}"
        )
    return scores


def _facts(inputs: GroupInputs, played: pl.DataFrame, sifted: pl.DataFrame) -> dict[str, Any]:
    reason = pl.col("reason").str.split(":").list.first()  # without what the judge's server said
    fates = sifted.group_by("task_id", maintain_order=True).agg(
        pl.col("kept").any(), reason.filter(reason.is_in(OF_GROUPS)).first()
    )
    lost = fates.filter(~pl.col("kept"))["reason"].fill_null("all_failed")
    failures = played["failure_type"].drop_nulls()
    return {
        "iteration": inputs.iteration,
        "groups": len(fates),
        "kept": int(fates["kept"].sum()),
        "dropped": _counts(lost),
        "trajectories": len(played),
        "failed": len(failures),
        "failures": _counts(failures),
        "mean_reward": sifted["reward"].mean(),
    }


def _counts(values: pl.Series) -> dict[str, int]:
    return dict(sorted(values.value_counts().iter_rows()))


GROUP = Step("group", GroupInputs, Groups, group)

if __name__ == "__main__":
    GROUP.main()
