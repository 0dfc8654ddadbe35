"""Nights: what each is to reach, and that neither crashes nor repetitions change it."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of

from flows.nights import date_in, nightly
from flows.train import train
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.nights import Night, fix_night, newest_checkpoint
from steps.common.runs import RunInUse, locked
from steps.common.status import status_of

MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


def in_a_flow(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs Prefect's API."""
    collected = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Prefect's own clients are not closed
    for mark in (pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(200), collected):
        test = mark(test)
    return test


def test_the_date_is_that_of_the_schedules_place() -> None:
    late = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    assert date_in(late, "Europe/Paris") == MONDAY
    assert date_in(late, "America/New_York") == date(2026, 3, 1)
    assert date_in(late, None) == late.astimezone().date()


def test_a_target_is_fixed_once(tmp_path: Path) -> None:
    assert fix_night(tmp_path, MONDAY, 5) == Night(date=MONDAY, first=0, last=5)
    assert fix_night(tmp_path, MONDAY, 7).last == 5
    assert [path.name for path in (tmp_path / "nights").iterdir()] == ["2026-03-02.json"]
    with locked(tmp_path), pytest.raises(RunInUse):
        fix_night(tmp_path, TUESDAY, 5)
    (tmp_path / "nights/2026-03-02.json").write_text("{")
    with pytest.raises(CorruptArtifact, match=r"2026-03-02\.json can't be read"):
        fix_night(tmp_path, MONDAY, 5)


@pytest.fixture
def root(runs: Path) -> Path:
    return runs / "night"


@in_a_flow
def test_a_night_that_crashed_ends_at_its_target(steps: Steps, root: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    steps.raises["checkpoints/0004"] = [InvalidInputs("crash")]
    with pytest.raises(InvalidInputs, match="crash"):
        nightly(config, 5, night=MONDAY)
    assert newest_checkpoint(root) == 3
    done = list(steps.made)

    nightly(config, 5, night=MONDAY)
    assert newest_checkpoint(root) == 5
    assert steps.made[len(done)] == "checkpoints/0004"
    assert [path for path in steps.made if steps.made.count(path) > 1] == ["checkpoints/0004"] * 2
    assert status_of(root).state == "finished"

    steps.made.clear(), steps.served.clear()
    nightly(config, 9, night=MONDAY)  # a second run of the same date
    nightly(config_of(tmp_path, "iterations=50"), 5, night=MONDAY)
    assert (steps.made, steps.served) == ([], ["stopped"] * 2)

    nightly(config, 2, night=TUESDAY)
    assert newest_checkpoint(root) == 7
    assert fix_night(root, TUESDAY, 1) == Night(date=TUESDAY, first=5, last=7)


@in_a_flow
def test_a_night_given_up_adds_nothing_later(steps: Steps, root: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    steps.raises["checkpoints/0002"] = [InvalidInputs("crash")]
    with pytest.raises(InvalidInputs, match="crash"):
        nightly(config, 2, night=MONDAY)
    nightly(config, 3, night=TUESDAY)
    assert newest_checkpoint(root) == 4
    steps.made.clear()
    assert nightly(config, 2, night=MONDAY) == []
    assert steps.made == []
    assert status_of(root).iterations == 4


@in_a_flow
def test_settings_may_change_from_night_to_night_only(steps: Steps, root: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, "iterations=1"))
    changed = config_of(tmp_path, "train.learning_rate=0.5", "evaluate.tasks=2", "rollout.groups=2")
    nightly(changed, 1, night=MONDAY)
    assert newest_checkpoint(root) == 2
    with pytest.raises(InvalidInputs, match=r"learning_rate: 0.5 then, 1e-05 now"):
        nightly(config_of(tmp_path, "rollout.groups=2"), 1, night=MONDAY)
    with pytest.raises(InvalidInputs, match=r"lora.rank: 16 then, 8 now"):
        nightly(config_of(tmp_path, "lora.rank=8"), 1, night=TUESDAY)


@in_a_flow
def test_a_night_without_a_date_is_todays(steps: Steps, root: Path, tmp_path: Path) -> None:
    config_of(tmp_path)  # writes the file
    nightly(tmp_path / "night.toml", 1, ["seed=3"])
    today = datetime.now().astimezone().date()
    assert fix_night(root, today, 9).last == 1
