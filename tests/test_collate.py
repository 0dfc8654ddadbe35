"""Advantages against TRL's definition, and what becomes a training sequence."""

import statistics
from pathlib import Path

import polars as pl
import pytest
from run_fixtures import group_of, sequence, store_rollouts, trajectory

from environments import Task, TokenSequence, TrajectoryGroup
from steps.collate import COLLATE, CollateInputs, CollateSettings, ScaleRewards, with_advantages
from steps.common import layout, tables
from steps.common.artifacts import Batch
from steps.common.errors import CorruptArtifact
from steps.common.settings import EnvironmentSettings
from steps.group import GROUP, GroupInputs, GroupSettings

REWARDS = {"a": [1.0, 0.0, 0.5, 0.25], "b": [0.2, 0.9, 0.4], "c": [1.0, 1.0], "d": [0.7]}


def reference(scale: ScaleRewards) -> list[float]:
    """TRL 1.16, `GRPOTrainer._generate_and_score_completions`, in plain Python."""
    whole = statistics.stdev([reward for rewards in REWARDS.values() for reward in rewards])
    advantages = []
    for rewards in REWARDS.values():
        mean = statistics.fmean(rewards)
        own = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        divisor = {"group": own + 1e-4, "batch": whole + 1e-4, "none": 1.0}[scale]
        advantages += [(reward - mean) / divisor for reward in rewards]
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(scale: ScaleRewards) -> None:
    rows = [{"task_id": task, "reward": reward} for task, rewards in REWARDS.items() for reward in rewards]
    assert with_advantages(pl.DataFrame(rows), scale)["advantage"].to_list() == pytest.approx(
        reference(scale), abs=1e-6
    )


def test_the_golden_record() -> None:
    """Rewards [1, 0, .5, .25] give these numbers in TRL's own code."""
    frame = pl.DataFrame({"task_id": ["a"] * 4, "reward": [1.0, 0.0, 0.5, 0.25]})
    golden = [1.317157, -1.024455, 0.146351, -0.439052]
    assert with_advantages(frame, "group")["advantage"].to_list() == pytest.approx(golden, abs=1e-6)
    assert with_advantages(frame, "none")["advantage"].to_list() == [0.5625, -0.4375, 0.0625, -0.1875]


def run_collate(root: Path, groups: list[TrajectoryGroup], settings: CollateSettings | None = None) -> Batch:
    rollouts = [store_rollouts(root, groups)]
    environment = EnvironmentSettings(name="tic_tac_toe")
    settings_of_group = GroupSettings(min_attempts=2)
    grouped = GROUP.run(
        GroupInputs(iteration=0, rollouts=rollouts, environment=environment, settings=settings_of_group),
        root,
        layout.groups(0),
    )
    inputs = CollateInputs(iteration=0, groups=grouped, rollouts=rollouts, settings=settings or CollateSettings())
    return COLLATE.run(inputs, root, layout.batch(0))


def table(root: Path) -> pl.DataFrame:
    return tables.read([root / layout.batch(0) / tables.BATCH], tables.BATCH_COLUMNS)


def test_only_kept_attempts_are_trained(tmp_path: Path) -> None:
    done = run_collate(tmp_path, [group_of("a", [1.0, 0.0, None]), group_of("b", [1.0, 1.0])])
    assert (done.sequences, done.tokens, done.trained_tokens, done.dropped) == (2, 12, 6, {})
    rows = table(tmp_path)
    assert rows["task_id"].to_list() == ["a", "a"]
    assert rows["attempt"].to_list() == [0, 1]
    assert rows["mask"].to_list()[0] == [False, False, True, True, False, True]


def test_sequences_of_one_trajectory_share_its_advantage(tmp_path: Path) -> None:
    forked = trajectory("a", 0, 1.0, sequence(), sequence(4, (3,)))
    done = run_collate(tmp_path, [TrajectoryGroup(Task(id="a"), [forked, trajectory("a", 1, 0.0)])])
    rows = table(tmp_path)
    assert done.sequences == 3
    assert rows["sequence"].to_list() == [0, 1, 0]
    assert rows["advantage"][0] == rows["advantage"][1] == -rows["advantage"][2]


def test_what_cannot_be_trained_is_dropped_and_counted(tmp_path: Path) -> None:
    attempts = [
        trajectory("a", 0, 1.0, sequence(200)),
        trajectory("a", 1, 0.5, sequence(6, ())),
        trajectory("a", 2, 0.0),
    ]
    done = run_collate(tmp_path, [TrajectoryGroup(Task(id="a"), attempts)], CollateSettings(max_sequence_tokens=100))
    assert (done.sequences, done.dropped) == (1, {"nothing_sampled": 1, "too_long": 1})
    assert table(tmp_path)["advantage"].to_list() == pytest.approx([-0.5 / (0.5 + 1e-4)])


@pytest.mark.parametrize(
    "broken", [TokenSequence([1, 2], [False], [0.0, 0.0]), TokenSequence([1, 2], [False, True], [0.0, float("nan")])]
)
def test_a_token_without_logprob_is_never_trained(tmp_path: Path, broken: TokenSequence) -> None:
    attempts = [trajectory("a", 0, 1.0, broken), trajectory("a", 1, 0.0)]
    with pytest.raises(CorruptArtifact, match="task a, attempt 0"):
        run_collate(tmp_path, [TrajectoryGroup(Task(id="a"), attempts)])


def test_nothing_kept_is_an_empty_batch(tmp_path: Path) -> None:
    done = run_collate(tmp_path, [group_of("a", [1.0, 1.0])])
    assert (done.sequences, done.tokens, done.trained_tokens) == (0, 0, 0)
    assert table(tmp_path).schema == pl.Schema(tables.BATCH_COLUMNS)
