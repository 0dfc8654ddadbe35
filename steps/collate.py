"""Groups → Batch: what one update learns from, a row for each token sequence.

The advantage of a trajectory is its reward compared with its group's, exactly as TRL's GRPOTrainer defines it
(DeepSeekMath, eq. for outcome supervision; Dr. GRPO's variant does not divide):

    A = (R - mean_group) / (std + 1e-4)        std with n-1: of the group, of the whole batch, or no division

All sequences of a trajectory share its advantage. A sequence longer than the limit is dropped and counted, never cut.
"""

from typing import Any, Literal

import polars as pl

from steps.common import tables
from steps.common.artifacts import Batch, Groups, Record, Rollouts
from steps.common.errors import CorruptArtifact
from steps.common.step import Inputs, Step, Workspace

EPSILON = 1e-4
ScaleRewards = Literal["group", "batch", "none"]


class CollateSettings(Record):
    """How rewards become advantages."""

    scale_rewards: ScaleRewards = "group"
    """What the centred rewards are divided by: their group's standard deviation, the batch's, or nothing."""
    max_sequence_tokens: int = 4096
    """Longer sequences are dropped and counted."""


class CollateInputs(Inputs):
    """An iteration's groups and the rollouts that they were made from."""

    iteration: int
    groups: Groups
    rollouts: list[Rollouts]
    settings: CollateSettings = CollateSettings()


def collate(inputs: CollateInputs, workspace: Workspace) -> dict[str, Any]:
    """Computes advantages and flattens kept trajectories into training sequences."""
    root = workspace.root
    groups = tables.read([root / inputs.groups.path / tables.GROUPS], tables.GROUP_COLUMNS)
    shards = [root / shard.path / tables.TRAJECTORIES for shard in inputs.rollouts]
    played = tables.read(shards, tables.TRAJECTORY_COLUMNS)
    kept = with_advantages(groups.filter("kept"), inputs.settings.scale_rewards)
    attempts = kept.select("iteration", "task_id", "attempt", "advantage")
    sequences = tables.with_sequences(attempts, played)
    _check(sequences)
    fates = sequences.with_columns(fate=_fate(inputs.settings.max_sequence_tokens))
    batch = fates.filter(pl.col("fate").is_null()).select(tables.BATCH_COLUMNS.keys())
    tables.write(batch, workspace.out / tables.BATCH)
    return {
        "iteration": inputs.iteration,
        "sequences": len(batch),
        "tokens": int(batch["token_ids"].list.len().sum()),
        "trained_tokens": int(batch["mask"].list.sum().sum()),
        "dropped": dict(sorted(fates["fate"].drop_nulls().value_counts().iter_rows())),
    }


def with_advantages(rewards: pl.DataFrame, scale: ScaleRewards) -> pl.DataFrame:
    """Adds the column `advantage` to rows of (task_id, reward); a group of one has advantage 0."""
    reward = pl.col("reward")
    centred = reward - reward.mean().over("task_id")
    spread = {
        "group": reward.std(ddof=1).over("task_id").fill_null(0.0) + EPSILON,
        "batch": reward.std(ddof=1).fill_null(0.0) + EPSILON,
        "none": pl.lit(1.0),
    }[scale]
    return rewards.with_columns(advantage=(centred / spread).cast(pl.Float32))


def _check(sequences: pl.DataFrame) -> None:
    """Every token has its mask, and every sampled one a finite log-probability. Raises `CorruptArtifact`."""
    lengths = [pl.col(name).list.len() for name in ("token_ids", "mask", "logprobs")]
    numbers = pl.col("logprobs").list.eval(pl.element().is_finite()).list.all()
    bad = sequences.filter((lengths[0] != lengths[1]) | (lengths[0] != lengths[2]) | ~numbers)
    if len(bad):
        row = bad.row(0, named=True)
        raise CorruptArtifact(
            f"{len(bad)} recorded sequences have tokens without mask or finite log-probability, "
            f"first: task {row['task_id']}, attempt {row['attempt']}; rewind the iteration's rollouts"
        )


def _fate(max_tokens: int) -> pl.Expr:
    return (
        pl.when(pl.col("token_ids").list.len() > max_tokens)
        .then(pl.lit("too_long"))
        .when(~pl.col("mask").list.any())
        .then(pl.lit("nothing_sampled"))
        .otherwise(pl.lit(None, dtype=pl.String))
    )


COLLATE = Step("collate", CollateInputs, Batch, collate)

if __name__ == "__main__":
    COLLATE.main()
