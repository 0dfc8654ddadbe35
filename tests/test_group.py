"""Which groups are trained on, and why the others are not."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from run_fixtures import group_of, store_rollouts

from environments import Environment, TrajectoryGroup
from steps.common import layout, tables
from steps.common.artifacts import Groups
from steps.common.errors import CorruptArtifact, InvalidInputs, NightschoolError
from steps.common.settings import EnvironmentSettings
from steps.group import GROUP, GroupInputs, GroupSettings

GAME = EnvironmentSettings(name="tic_tac_toe")


class Ranked(Environment):
    """Scores a group by the order of its attempts."""

    async def score(self, group: TrajectoryGroup) -> Sequence[float | None]:
        return [None if t.attempt == 0 else float(t.attempt) for t in group.trajectories]


class Unfinite(Environment):
    """Scores with a number that is none."""

    async def score(self, group: TrajectoryGroup) -> Sequence[float | None]:
        return [float("nan") for _ in group.trajectories]


class TooFew(Environment):
    """Scores fewer attempts than there are."""

    async def score(self, group: TrajectoryGroup) -> Sequence[float | None]:
        return [1.0]


def run_group(
    root: Path,
    groups: list[TrajectoryGroup],
    settings: GroupSettings | None = None,
    environment: EnvironmentSettings = GAME,
) -> Groups:
    rollouts = [store_rollouts(root, groups[::2], shard=0), store_rollouts(root, groups[1::2], shard=1)]
    inputs = GroupInputs(iteration=0, rollouts=rollouts, environment=environment, settings=settings or GroupSettings())
    return GROUP.run(inputs, root, layout.groups(0))


def table(root: Path) -> pl.DataFrame:
    return tables.read([root / layout.groups(0) / tables.GROUPS], tables.GROUP_COLUMNS)


def test_a_group_with_something_to_compare_is_kept(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0, 0.0, 0.5]), group_of("b", [0.25, 0.75])])
    assert (done.groups, done.kept, done.dropped, done.trajectories) == (2, 2, {}, 5)
    assert done.mean_reward == pytest.approx(0.5)
    rows = table(tmp_path).filter(task_id="a")
    assert rows["group_mean"].to_list() == [0.5] * 3
    assert rows["group_std"].to_list() == pytest.approx([0.5] * 3)


def test_equal_rewards_teach_nothing(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0, 1.0]), group_of("b", [0.1 + 0.2, 0.3])])
    assert (done.kept, done.dropped) == (0, {"zero_variance": 2})


def test_equal_rewards_can_be_kept(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0, 1.0])], GroupSettings(drop_zero_variance=False))
    assert done.kept == 1


def test_a_group_with_a_failure_is_dropped_whole(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0, 0.0, None]), group_of("b", [None, None])])
    assert (done.kept, done.dropped) == (0, {"all_failed": 1, "short_group": 1})
    assert (done.failed, done.failures) == (3, {"ValueError": 3})
    assert table(tmp_path).filter(task_id="a")["reason"].to_list() == ["short_group", "short_group", "failed"]


def test_short_groups_are_kept_where_the_rule_says_so(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0, 0.0, None])], GroupSettings(min_attempts=2))
    assert done.kept == 1
    assert table(tmp_path)["kept"].to_list() == [True, True, False]


def test_one_attempt_is_no_group(tmp_path: Path) -> None:
    done = run_group(tmp_path, [group_of("a", [1.0])])
    assert done.dropped == {"short_group": 1}


def test_an_environment_may_score_the_whole_group(tmp_path: Path) -> None:
    environment = EnvironmentSettings(name=f"{__name__}:Ranked")
    done = run_group(tmp_path, [group_of("a", [9.0, 9.0, 9.0, None])], GroupSettings(min_attempts=2), environment)
    rows = table(tmp_path)
    assert rows["reward"].to_list() == [None, 1.0, 2.0, None]
    assert rows["reason"].to_list() == ["unscored", None, None, "failed"]
    assert done.mean_reward == 1.5


@pytest.mark.parametrize(("name", "message"), [("Unfinite", "finite rewards"), ("TooFew", "must give 2")])
def test_scores_that_are_none_stop_the_step(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(NightschoolError, match=message):
        run_group(tmp_path, [group_of("a", [1.0, 0.0])], environment=EnvironmentSettings(name=f"{__name__}:{name}"))
    assert not (tmp_path / layout.groups(0)).exists()


def test_an_unknown_environment_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs, match="tic_tac_toe"):
        run_group(tmp_path, [group_of("a", [1.0, 0.0])], environment=EnvironmentSettings(name="ludo"))


def test_a_truncated_table_is_named(tmp_path: Path) -> None:
    rollouts = store_rollouts(tmp_path, [group_of("a", [1.0, 0.0])])
    file = tmp_path / rollouts.path / tables.TRAJECTORIES
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptArtifact, match=r"rollouts/000/trajectories\.parquet"):
        GROUP.run(GroupInputs(iteration=0, rollouts=[rollouts], environment=GAME), tmp_path, layout.groups(0))
