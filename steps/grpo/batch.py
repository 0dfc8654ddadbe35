"""Stored records as the tensors of a loss: trajectories into minibatches, rows into micro-batches by a token budget.

A micro-batch is cut where the first of its rows was sampled from: what lies before is its prompt, all after is
completion, of which the `tool_mask` picks the sampled tokens. So nothing is padded on the left, positions are those
the sampler saw, and the padded size is rows x longest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch

from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.tables import BATCH, BATCH_COLUMNS, read

Tensors = dict[str, torch.Tensor]
Minibatch = list[Tensors]
"""Micro-batches whose gradients are added before one optimizer step."""


@dataclass(frozen=True)
class Example:
    """One sequence of tokens. All lists have equal length."""

    trajectory: tuple[str, int]
    """Task id and attempt: rows of one trajectory stay together."""
    token_ids: list[int]
    mask: list[bool]
    """True where the policy sampled the token: only those are trained."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def start(self) -> int:
        """Index of the first sampled token."""
        return self.mask.index(True)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)


@dataclass(frozen=True)
class Row(Example):
    """A sequence with what its tokens were worth."""

    logprobs: list[float]
    """The sampler's, nats at the sampling temperature; not read where `mask` is False."""
    advantage: float


ExampleT = TypeVar("ExampleT", bound=Example)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a `Batch` that have something to train, in the file's order.

    Raises `InvalidInputs` at the first row that cannot be trained on, and says which.
    """
    file = folder / BATCH
    if not file.is_file():
        raise CorruptArtifact(f"{file} is missing; restore it from a backup, or move {folder} away to make it again")
    records = read([file], BATCH_COLUMNS).iter_rows(named=True)
    return [_checked(record, file) for record in records if any(record["mask"])]


def check_vocabulary(rows: Sequence[Example], size: int) -> None:
    """Raises `InvalidInputs` where a token id lies outside of the model's vocabulary of `size` tokens."""
    for row in rows:
        if not 0 <= min(row.token_ids) <= max(row.token_ids) < size:
            raise InvalidInputs(
                f"{_name(row)} holds token {max(row.token_ids)}, but the base model knows {size} tokens: "
                f"these rollouts come from another model"
            )


def minibatches(rows: Sequence[Row], count: int, seed: str) -> list[list[Row]]:
    """Deals whole trajectories, shuffled by `seed`, into at most `count` minibatches of near-equal size, none empty."""
    trajectories: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        trajectories.setdefault(row.trajectory, []).append(row)
    order = list(trajectories)
    Random(seed).shuffle(order)
    bounds = [len(order) * i // count for i in range(count + 1)]
    parts = [order[a:b] for a, b in pairwise(bounds) if b > a]
    return [[row for key in part for row in trajectories[key]] for part in parts]


def micro_batches(rows: Sequence[Row], tokens: int, rank: int = 0, world: int = 1) -> Minibatch:
    """One rank's tensors for a minibatch, dealt by `deal`.

    `rows_scale` and `num_items_in_batch` make the sum over micro-batches, averaged over ranks, the
    loss of the whole minibatch: TRL's means over a micro-batch's rows are scaled by the one, its sums over tokens
    divided by the other.
    """
    sampled = torch.tensor(float(sum(row.sampled for row in rows)))
    batch: Minibatch = []
    for part, mine in deal(rows, tokens, rank, world):
        scale = torch.tensor(len(mine) * world / len(rows))
        cut = min(row.start for row in part)
        batch.append(_tensors(mine, cut) | {"num_items_in_batch": sampled, "rows_scale": scale})
    return batch


def deal(
    rows: Sequence[ExampleT], tokens: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[list[ExampleT], list[ExampleT]]]:
    """Micro-batches of at most `tokens` with padding, and one rank's share of each; a longer row stands alone.

    Every rank gets as many micro-batches of as many rows, as TRL's collective operations need; rows that only fill up
    have an empty mask.
    """
    for part in _within(sorted(rows, key=len, reverse=True), tokens, world):
        fillers = [replace(part[-1], mask=[False] * len(part[-1]))] * (-len(part) % world)
        yield part, (part + fillers)[rank::world]


def _within(rows: Sequence[ExampleT], tokens: int, world: int) -> Iterator[list[ExampleT]]:
    part: list[ExampleT] = []
    for row in rows:
        full = math.ceil((len(part) + 1) / world) * len(part[0]) > tokens if part else False
        if full:
            yield part
            part = []
        part.append(row)
    yield part


def _tensors(rows: Sequence[Row], cut: int) -> Tensors:
    width = max(map(len, rows))
    ids = _padded([row.token_ids for row in rows], width, torch.long)
    present = _padded([[1] * len(row) for row in rows], width, torch.long)
    mask = _padded([row.mask for row in rows], width, torch.bool)
    logprobs = _padded([row.logprobs for row in rows], width, torch.float32)
    return {
        "prompt_ids": ids[:, :cut],
        "prompt_mask": present[:, :cut],
        "completion_ids": ids[:, cut:],
        "completion_mask": present[:, cut:],
        "tool_mask": mask[:, cut:].long(),
        "sampling_per_token_logps": torch.where(mask, logprobs, 0.0)[:, cut:],
        "advantages": torch.tensor([row.advantage for row in rows]),
    }


def _padded(lists: Sequence[Sequence[Any]], width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[*values, *[0] * (width - len(values))] for values in lists], dtype=dtype)


def _checked(record: dict[str, Any], file: Path) -> Row:
    row = Row(
        (record["task_id"], record["attempt"]),
        record["token_ids"],
        record["mask"],
        record["logprobs"],
        record["advantage"],
    )
    lengths = {len(row.token_ids), len(row.mask), len(row.logprobs)}
    if len(lengths) > 1:
        raise CorruptArtifact(f"{file}: {_name(row)} has token_ids, mask and logprobs of unequal lengths")
    if row.mask[0]:
        raise InvalidInputs(f"{file}: {_name(row)} starts with a sampled token, which no prompt precedes")
    if not _finite(row.advantage):
        raise InvalidInputs(f"{file}: {_name(row)} has advantage {row.advantage}")
    if not all(_finite(value) for value, sampled in zip(row.logprobs, row.mask, strict=True) if sampled):
        raise InvalidInputs(
            f"{file}: {_name(row)} has a sampled token without a finite log-probability: "
            f"the server that sampled it must return them"
        )
    return replace(row, logprobs=[value if _finite(value) else 0.0 for value in row.logprobs])


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _name(row: Example) -> str:
    task, attempt = row.trajectory
    return f"task {task}, attempt {attempt}"
