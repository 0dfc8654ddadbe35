"""The Parquet tables: their columns, how rows are written and read.

Polars is the frame, Parquet (zstd 1) the format. Everything that has no fixed shape (metrics, messages) is JSON in a
string column, so that files of different environments and versions can always be read together.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from environments import Failure, Task, TokenSequence, Trajectory, TrajectoryGroup
from steps.common.errors import CorruptArtifact

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

TRAJECTORIES = "trajectories.parquet"
GROUPS = "groups.parquet"
JUDGEMENTS = "judgements.parquet"
BATCH = "batch.parquet"

SEQUENCE = pl.Struct({"token_ids": pl.List(pl.Int32), "mask": pl.List(pl.Boolean), "logprobs": pl.List(pl.Float32)})

TRAJECTORY_COLUMNS: Schema = {
    "iteration": pl.Int32,  # that the policy's checkpoint starts; null where another model played
    "shard": pl.Int32,
    "task_id": pl.String,
    "task": pl.String,  # JSON of the Task
    "attempt": pl.Int32,  # 0 … group_size-1
    "reward": pl.Float64,  # null where it failed
    "metrics": pl.String,  # JSON
    "metadata": pl.String,  # JSON
    "messages": pl.String,  # JSON, for people
    "sequences": pl.List(SEQUENCE),  # exact tokens; mask: the policy sampled it; logprobs in nats, 0 elsewhere
    "failure_type": pl.String,  # the exception's name
    "failure_message": pl.String,
    "failure_traceback": pl.String,
    "turns": pl.Int32,  # model calls
    "prompt_tokens": pl.Int64,  # as the server counts them, over all calls
    "completion_tokens": pl.Int64,
    "seconds": pl.Float64,
}

GROUP_COLUMNS: Schema = {
    "iteration": pl.Int32,
    "task_id": pl.String,
    "attempt": pl.Int32,
    "shard": pl.Int32,
    "reward": pl.Float64,  # after the environment's score(); null where it failed or was dropped
    "kept": pl.Boolean,  # is it trained on?
    # why not: failed, unscored, short_group, zero_variance, identical, judge_failed: …; null where kept
    "reason": pl.String,
    "group_mean": pl.Float64,  # over the group's scored attempts
    "group_std": pl.Float64,  # sample standard deviation (n-1); null for fewer than two
}

JUDGEMENT_COLUMNS: Schema = {
    "iteration": pl.Int32,
    "task_id": pl.String,
    "attempt": pl.Int32,
    "own_reward": pl.Float64,  # what the attempt was worth to the environment; null where it failed
    "score": pl.Float64,  # the judge's, from 0 to 1; null where it was not asked about the attempt, or failed
    "explanation": pl.String,
    "dropped": pl.String,  # why the group has no scores: short_group, identical, judge_failed: …
}

BATCH_COLUMNS: Schema = {
    "iteration": pl.Int32,
    "task_id": pl.String,
    "attempt": pl.Int32,
    "sequence": pl.Int32,  # index among the trajectory's sequences
    "token_ids": pl.List(pl.Int32),
    "mask": pl.List(pl.Boolean),  # the policy sampled it
    "logprobs": pl.List(pl.Float32),  # of the sampler, nats at the sampling temperature; 0 where mask is false
    "advantage": pl.Float32,
}


def encode(frame: pl.DataFrame) -> bytes:
    """A table as the content of a Parquet file."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd", compression_level=1)
    return buffer.getvalue()


def write(frame: pl.DataFrame, file: Path) -> None:
    """Writes a table. By Python's own hand: a full disk is an `OSError` then, where Polars has an error of its own."""
    file.write_bytes(encode(frame))


def read(files: Sequence[Path], schema: Schema) -> pl.DataFrame:
    """All rows of `files`, in their order; no files, no rows.

    Raises `CorruptArtifact`, naming the file that is no Parquet or has other columns.
    """
    return pl.concat([pl.DataFrame(schema=schema), *(_read_one(file, schema) for file in files)])


def _read_one(file: Path, schema: Schema) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(file, columns=list(schema))
        return frame.select(pl.col(name).cast(kind) for name, kind in schema.items())
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise CorruptArtifact(
            f"{file} can't be read as a table ({reason}); `nightschool verify` checks the whole run"
        ) from None


def with_sequences(attempts: pl.DataFrame, played: pl.DataFrame) -> pl.DataFrame:
    """A row a sequence of the trajectories in `played` that `attempts` names by task and attempt, in its order."""
    return (
        attempts.join(
            played.select("task_id", "attempt", "sequences"),
            on=["task_id", "attempt"],
            how="left",
            maintain_order="left",
        )
        .with_columns(sequence=pl.int_ranges(pl.col("sequences").list.len(), dtype=pl.Int32))
        .explode("sequences", "sequence")
        .filter(pl.col("sequences").is_not_null())
        .unnest("sequences")
    )


def frame_of_groups(groups: Iterable[TrajectoryGroup], iteration: int | None, shard: int) -> pl.DataFrame:
    """Trajectories as rows, in order."""
    rows = [
        _row(group.task, trajectory) | {"iteration": iteration, "shard": shard}
        for group in groups
        for trajectory in group.trajectories
    ]
    return pl.DataFrame(rows, schema=TRAJECTORY_COLUMNS)


def groups_of_frame(frame: pl.DataFrame) -> list[TrajectoryGroup]:
    """The inverse of `frame_of_groups`."""
    groups: dict[str, TrajectoryGroup] = {}
    for row in frame.iter_rows(named=True):
        task = Task.model_validate_json(row["task"])
        groups.setdefault(task.id, TrajectoryGroup(task, [])).trajectories.append(_trajectory(row))
    return list(groups.values())


def _row(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "task_id": trajectory.task_id,
        "task": task.model_dump_json(),
        "attempt": trajectory.attempt,
        "reward": trajectory.reward,
        "metrics": json.dumps(trajectory.metrics),
        "metadata": json.dumps(trajectory.metadata, default=str),
        "messages": json.dumps(trajectory.messages, default=str),
        "sequences": [_sequence(sequence) for sequence in trajectory.sequences],
        "failure_type": failure and failure.type,
        "failure_message": failure and failure.message,
        "failure_traceback": failure and failure.traceback,
        "turns": trajectory.turns,
        "prompt_tokens": trajectory.prompt_tokens,
        "completion_tokens": trajectory.completion_tokens,
        "seconds": trajectory.seconds,
    }


def _sequence(sequence: TokenSequence) -> dict[str, Any]:
    logprobs = [float(logprob) for logprob in sequence.logprobs]
    return {"token_ids": sequence.token_ids, "mask": sequence.mask, "logprobs": logprobs}


def _trajectory(row: dict[str, Any]) -> Trajectory:
    failed = row["failure_type"] is not None
    return Trajectory(
        task_id=row["task_id"],
        attempt=row["attempt"],
        messages=json.loads(row["messages"]),
        sequences=[TokenSequence(**sequence) for sequence in row["sequences"]],
        reward=row["reward"],
        metrics=json.loads(row["metrics"]),
        metadata=json.loads(row["metadata"]),
        failure=Failure(row["failure_type"], row["failure_message"], row["failure_traceback"]) if failed else None,
        turns=row["turns"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        seconds=row["seconds"],
    )
