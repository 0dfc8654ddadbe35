"""The best attempts of a run, with the exact tokens that were sampled: rejection sampling from stored groups."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from steps.common import layout, tables
from steps.common.artifacts import Checkpoint, Manifest, read_artifact, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs

SEQUENCES = "sequences.parquet"
SEQUENCE_COLUMNS: tables.Schema = {
    "iteration": pl.Int32,
    "task_id": pl.String,
    "attempt": pl.Int32,
    "sequence": pl.Int32,  # index among the trajectory's sequences
    "token_ids": pl.List(pl.Int32),
    "mask": pl.List(pl.Boolean),  # the policy sampled it
    "reward": pl.Float64,
}
SAME = 1e-12
"""Rewards nearer than this are equal, as where groups are sifted."""


def grouped_iterations(folder: Path) -> int:
    """How many of the run's iterations are grouped, the first ones. Raises `InvalidInputs` where none is."""
    numbers = layout.numbered(folder, "iterations")
    count = next((i for i in numbers if read_manifest(folder / layout.groups(i)) is None), len(numbers))
    if count == 0:
        raise InvalidInputs(f"sft.best_of: {folder} has no groups yet, of which the best could be imitated")
    return count


def digest_of_groups(folder: Path, iterations: int) -> str:
    """Of the first so many iterations' groups and of what they were made from. What was pruned counts as gone."""
    found = (
        [read_manifest(folder / path) for path in (layout.groups(i), *_shards(folder, i))] for i in range(iterations)
    )
    digests = [[m and not m.pruned and m.digest for m in manifests] for manifests in found]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def check_base(folder: Path, base_model: str, base_digest: str | None) -> None:
    """Raises `InvalidInputs` where the run is on another base model: its tokens would mean something else."""
    theirs = read_artifact(Checkpoint, folder, layout.checkpoint(0))
    same = base_digest == theirs.base_digest if base_digest else base_model == theirs.base_model
    if not same:
        raise InvalidInputs(
            f"sft.best_of takes the tokens of {folder.name} as they are, but its base model is "
            f"{_name(theirs.base_model, theirs.base_digest)} and this run's is {_name(base_model, base_digest)}: "
            f"name the same one"
        )


def best_attempts(folder: Path, iterations: int, min_reward: float | None) -> tuple[pl.DataFrame, dict[str, int]]:
    """The sequences of the best attempt of each group, and how many groups gave none, by reason.

    Of equals the first attempt is the best. It must be worth `min_reward`, or without that more than the worst. The
    very same tokens are taken once.
    """
    found: list[pl.DataFrame] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for i in range(iterations):
        groups = tables.read([folder / layout.groups(i) / tables.GROUPS], tables.GROUP_COLUMNS)
        shards = [folder / path for path in _shards(folder, i)]
        if any(_manifest(shard).pruned for shard in shards):
            dropped["pruned"] += groups["task_id"].n_unique()
            continue
        best = _best(groups, min_reward)
        dropped.update(best["fate"].drop_nulls())
        attempts = _with_sequences(best.filter(pl.col("fate").is_null()), shards)
        for attempt in attempts.partition_by("task_id", maintain_order=True):
            tokens = hashlib.sha256(json.dumps(attempt["token_ids"].to_list()).encode()).hexdigest()
            if tokens in seen:
                dropped["repeated"] += 1
            else:
                seen.add(tokens)
                found.append(attempt)
    return pl.concat([pl.DataFrame(schema=SEQUENCE_COLUMNS), *found]), dict(sorted(dropped.items()))


def _best(groups: pl.DataFrame, min_reward: float | None) -> pl.DataFrame:
    """A row a group, in their order: its best attempt, and under `fate` why that is not taken."""
    scored = groups.filter(pl.col("reward").is_not_null()).sort("reward", "attempt", descending=[True, False])
    best = scored.group_by("task_id").agg(
        pl.col("iteration", "attempt", "reward").first(), worst=pl.col("reward").last()
    )
    too_bad = (
        (pl.col("reward") - pl.col("worst") <= SAME, "all_alike")
        if min_reward is None
        else (pl.col("reward") < min_reward, "below_min_reward")
    )
    return (
        groups.select("task_id")
        .unique(maintain_order=True)
        .join(best, on="task_id", how="left", maintain_order="left")
        .with_columns(
            fate=pl.when(pl.col("reward").is_null())
            .then(pl.lit("all_failed"))
            .when(too_bad[0])
            .then(pl.lit(too_bad[1]))
        )
    )


def _with_sequences(best: pl.DataFrame, shards: Iterable[Path]) -> pl.DataFrame:
    """A row a sequence of the attempts in `best`, in their order."""
    played = tables.read([shard / tables.TRAJECTORIES for shard in shards], tables.TRAJECTORY_COLUMNS)
    sequences = tables.with_sequences(best, played)
    return sequences.select(pl.col(name).cast(kind) for name, kind in SEQUENCE_COLUMNS.items())


def _shards(folder: Path, iteration: int) -> Iterator[str]:
    """Paths of the rollouts that the iteration's groups were made from."""
    given: list[dict[str, Any]] = _manifest(folder / layout.groups(iteration)).inputs["rollouts"]
    yield from (rollouts["path"] for rollouts in given)


def _manifest(folder: Path) -> Manifest:
    if (manifest := read_manifest(folder)) is None:
        raise CorruptArtifact(f"{folder} has no {layout.MANIFEST}: was its run changed just now?")
    return manifest


def _name(base_model: str, digest: str | None) -> str:
    return f"{base_model} (digest {digest[:12]})" if digest else base_model
