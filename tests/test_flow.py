"""The loop: what it does, in which order; what it does not do again; when it stops, and what it says then."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of

from flows.train import NothingToLearn, train
from steps.common.errors import CorruptArtifact, InvalidInputs, StepFailed, WrongWeights
from steps.common.rewind import Rewind, rewind
from steps.common.runs import RunInUse
from steps.common.status import status_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
# Prefect's own clients are collected rather than closed.
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.timeout(200)]

ITERATION_0 = ["iterations/0000/rollouts/000", "iterations/0000/rollouts/001", "checkpoints/0001"]


def test_a_run_does_each_step_once_and_in_order(steps: Steps, runs: Path, tmp_path: Path) -> None:
    evaluations = train(config_of(tmp_path))
    assert [evaluation.iteration for evaluation in evaluations] == [0, 1, 2]
    assert sorted(steps.made[3:5]) == ITERATION_0[:2]  # side by side
    assert steps.made[:3] + steps.made[5:7] == [
        "model",
        "checkpoints/0000",
        "evaluations/0000",
        *ITERATION_0[2:],
        "evaluations/0001",
    ]
    assert steps.made[-2:] == ["checkpoints/0002", "evaluations/0002"]
    assert steps.served[-1] == "stopped"
    assert status_of(runs / "night").state == "finished"

    steps.made.clear(), steps.served.clear()
    assert train(config_of(tmp_path)) == evaluations
    assert (steps.made, steps.served) == ([], ["stopped"])

    train(config_of(tmp_path, "iterations=3"))
    assert set(steps.made) == {
        "iterations/0002/rollouts/000",
        "iterations/0002/rollouts/001",
        "checkpoints/0003",
        "evaluations/0003",
    }


def test_changed_settings_are_refused_until_the_run_is_rewound(steps: Steps, runs: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path))
    changed = config_of(tmp_path, "train.learning_rate=0.5")
    with pytest.raises(InvalidInputs, match=r"settings.learning_rate: 1e-05 then, 0.5 now.*another run name.*rewind"):
        train(changed)

    rewind(runs / "night", Rewind(iteration=0, step="train"))
    kept = (runs / "night/iterations/0000/batch/manifest.json").read_bytes()
    steps.made.clear()
    train(changed)
    assert steps.made[:2] == ["checkpoints/0001", "evaluations/0001"]
    assert (runs / "night/iterations/0000/batch/manifest.json").read_bytes() == kept
    assert list((runs / "night/superseded").glob("*/checkpoints/0002/manifest.json"))


def test_a_run_that_learns_nothing_stops_and_says_so(steps: Steps, runs: Path, tmp_path: Path) -> None:
    steps.rewards = [1.0, 1.0]
    with pytest.raises(NothingToLearn, match=r"2 iterations in a row had nothing to learn.*4 groups, 4 zero_variance"):
        train(config_of(tmp_path, "iterations=9", "stop_after_idle=2"))
    status = status_of(runs / "night")
    assert status.state == "stopped"
    assert [checkpoint.iteration for checkpoint in status.checkpoints if checkpoint.complete] == [0, 1, 2]


def test_a_step_that_crashed_is_tried_again(steps: Steps, runs: Path, tmp_path: Path) -> None:
    steps.raises["iterations/0000/rollouts/001"] = [StepFailed("killed")]
    train(config_of(tmp_path, "iterations=1"))
    assert steps.made.count("iterations/0000/rollouts/001") == 2
    assert steps.made.count("iterations/0000/rollouts/000") == 1


def test_wrong_inputs_are_not_tried_again(steps: Steps, runs: Path, tmp_path: Path) -> None:
    steps.raises["checkpoints/0001"] = [InvalidInputs("odd")]
    with pytest.raises(InvalidInputs, match=r"^odd$"):
        train(config_of(tmp_path))
    assert steps.made.count("checkpoints/0001") == 1


def test_nothing_is_played_with_wrong_weights(steps: Steps, runs: Path, tmp_path: Path) -> None:
    steps.raises["serve"] = [WrongWeights("the base answers")]
    with pytest.raises(WrongWeights, match="the base answers"):
        train(config_of(tmp_path))
    assert steps.made == ["model", "checkpoints/0000"]
    assert steps.served == ["checkpoints/0000", "stopped"]


def test_one_process_at_a_time(steps: Steps, runs: Path, tmp_path: Path) -> None:
    lock = runs / "night/.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(str(os.getpid()))
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunInUse, match=f"is in use by process {os.getpid()}"):
            train(config_of(tmp_path))
        assert status_running(runs / "night")
    assert steps.made == []


def status_running(root: Path) -> bool:
    from steps.common.runs import in_use

    return in_use(root)


def test_half_done_work_is_swept(steps: Steps, runs: Path, tmp_path: Path) -> None:
    partial = runs / "night/checkpoints/.0001.abc.partial"
    partial.mkdir(parents=True)
    train(config_of(tmp_path, "iterations=1"))
    assert not partial.exists()


def test_a_damaged_table_stops_the_run_and_is_named(steps: Steps, runs: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, "iterations=1"))
    rewind(runs / "night", Rewind(iteration=0, step="group"))
    table = runs / "night/iterations/0000/rollouts/001/trajectories.parquet"
    table.write_bytes(bytes(table.stat().st_size))
    with pytest.raises(CorruptArtifact, match=f"{table} can't be read"):
        train(config_of(tmp_path, "iterations=1"))


def test_a_damaged_manifest_stops_the_run_and_is_named(steps: Steps, runs: Path, tmp_path: Path) -> None:
    train(config_of(tmp_path, "iterations=1"))
    manifest = runs / "night/iterations/0000/groups/manifest.json"
    manifest.write_text("{")
    with pytest.raises(CorruptArtifact, match=f"{manifest} is not a manifest"):
        train(config_of(tmp_path, "iterations=1"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small disk takes privileges")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_nothing(
    steps: Steps, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSCHOOL_RUNS", str(small_disk))
    train(config_of(tmp_path, "iterations=1"))
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left"):
        train(config_of(tmp_path))
    filler.unlink()
    steps.made.clear()
    train(config_of(tmp_path))
    assert "checkpoints/0001" not in steps.made
    assert not list((small_disk / "night").rglob("*.partial"))


def test_a_folder_that_can_not_be_written_is_named(
    steps: Steps, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSCHOOL_RUNS", str(small_disk))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match=f"Read-only file system: '{small_disk}/night'"):
        train(config_of(tmp_path))
