"""Rows become minibatches of whole trajectories and micro-batches within a token budget, for any number of ranks."""

import pytest

from steps.grpo.batch import Row, micro_batches, minibatches

pytestmark = pytest.mark.train


def row(task: int, attempt: int, prompt: int, sampled: int) -> Row:
    length = prompt + sampled
    ids = [100 * task + attempt] * length
    return Row((f"task-{task}", attempt), ids, [False] * prompt + [True] * sampled, [-1.0] * length, 1.0)


ROWS = [row(task, attempt, 2 + task, 1 + (task * 7 + attempt * 3) % 9) for task in range(5) for attempt in range(4)]


def test_minibatches_hold_every_row_once_and_trajectories_whole() -> None:
    split = [*ROWS, *ROWS[:6]]  # the first six trajectories have a second sequence
    parts = minibatches(split, 3, "seed")
    assert sorted(id(row) for part in parts for row in part) == sorted(map(id, split))
    owners = [{row.trajectory for row in part} for part in parts]
    assert not owners[0] & owners[1] and not owners[1] & owners[2] and not owners[0] & owners[2]
    assert [len(owner) for owner in owners] == [6, 7, 7]
    assert minibatches(split, 3, "seed") == parts != minibatches(split, 3, "another seed")


def test_fewer_trajectories_than_updates_make_fewer_minibatches() -> None:
    assert [len(part) for part in minibatches(ROWS[:2], 5, "")] == [1, 1]


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_micro_batches_stay_within_the_budget(budget: int) -> None:
    parts = micro_batches(ROWS, budget)
    for part in parts:
        rows = part["prompt_ids"].shape[0]
        padded = rows * (part["prompt_ids"].shape[1] + part["completion_ids"].shape[1])
        assert padded <= budget or rows == 1
        assert part["prompt_mask"].all()
    assert sum(int(part["tool_mask"].sum()) for part in parts) == sum(row.sampled for row in ROWS)
    assert sum(float(part["rows_scale"]) for part in parts) == pytest.approx(1)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_equal_shapes_and_every_row_once(world: int) -> None:
    ranks = [micro_batches(ROWS, 30, rank, world) for rank in range(world)]
    assert len({len(parts) for parts in ranks}) == 1
    for together in zip(*ranks, strict=True):
        assert len({part["prompt_ids"].shape[0] for part in together}) == 1
    trained = sum(int(part["tool_mask"].sum()) for parts in ranks for part in parts)
    assert trained == sum(row.sampled for row in ROWS)
    # Averaged over ranks, the shares of all micro-batches' real rows are 1 / rows each.
    shares = [
        float(part["rows_scale"]) / part["prompt_ids"].shape[0] / world
        for parts in ranks
        for part in parts
        for real in part["tool_mask"].any(1)
        if real
    ]
    assert shares == pytest.approx([1 / len(ROWS)] * len(ROWS))
