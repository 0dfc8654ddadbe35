"""The step contract: done once, whole or not at all; refused with other inputs; verified."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from steps.common import layout
from steps.common.artifacts import Artifact, read_manifest, verify
from steps.common.errors import DO_NOT_RETRY, CorruptArtifact, InvalidInputs
from steps.common.step import Inputs, Step, Workspace, exit_status_of, sweep_partials


class DoubleInputs(Inputs):
    number: int
    timeout: float = 1.0

    operational: ClassVar[frozenset[str]] = frozenset({"timeout"})


class Doubled(Artifact):
    result: int


def double(inputs: DoubleInputs, workspace: Workspace) -> dict[str, Any]:
    """Doubles a number."""
    (workspace.out / "data").mkdir()
    (workspace.out / "data" / "result.txt").write_text(str(2 * inputs.number))
    return {"result": 2 * inputs.number}


DOUBLE = Step("double", DoubleInputs, Doubled, double)


def never(inputs: DoubleInputs, workspace: Workspace) -> dict[str, Any]:
    raise AssertionError("finished work was done again")


def test_runs_once_and_is_reused(tmp_path: Path) -> None:
    made = DOUBLE.run(DoubleInputs(number=4), tmp_path, "out/0001")
    again = Step("double", DoubleInputs, Doubled, never).run(DoubleInputs(number=4), tmp_path, "out/0001")
    assert made == again
    assert made.result == 8
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["0001"]


def test_operational_fields_do_not_undo_finished_work(tmp_path: Path) -> None:
    made = DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    assert DOUBLE.run(DoubleInputs(number=4, timeout=9), tmp_path, "out") == made


def test_other_inputs_are_refused_and_named(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    with pytest.raises(InvalidInputs, match=r"number: 4 then, 5 now.*another run name.*rewind"):
        DOUBLE.run(DoubleInputs(number=5), tmp_path, "out")


def test_a_moved_run_stays_finished(tmp_path: Path) -> None:
    made = DOUBLE.run(DoubleInputs(number=4), tmp_path / "here", "out")
    (tmp_path / "here").rename(tmp_path / "there")
    assert DOUBLE.finished(DoubleInputs(number=4), tmp_path / "there", "out") == made


def test_equal_data_have_equal_digests(tmp_path: Path) -> None:
    first = DOUBLE.run(DoubleInputs(number=4), tmp_path / "a", "out")
    second = DOUBLE.run(DoubleInputs(number=4), tmp_path / "b", "out")
    other = DOUBLE.run(DoubleInputs(number=5), tmp_path / "c", "out")
    assert first.digest == second.digest != other.digest


def test_a_failing_step_leaves_nothing(tmp_path: Path) -> None:
    def fail(inputs: DoubleInputs, workspace: Workspace) -> dict[str, Any]:
        (workspace.out / "half.txt").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Step("double", DoubleInputs, Doubled, fail).run(DoubleInputs(number=1), tmp_path, "out/0001")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_second_of_two_attempts_returns_the_winner(tmp_path: Path) -> None:
    both_working = threading.Barrier(2, timeout=10)

    def slow(inputs: DoubleInputs, workspace: Workspace) -> dict[str, Any]:
        both_working.wait()
        return double(inputs, workspace)

    step, results = Step("double", DoubleInputs, Doubled, slow), []
    attempts = [
        threading.Thread(target=lambda: results.append(step.run(DoubleInputs(number=4), tmp_path, "out/0001")))
        for _ in range(2)
    ]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join(timeout=10)
    assert len(results) == 2
    assert results[0] == results[1]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["0001"]


def test_a_folder_without_manifest_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(InvalidInputs, match="in the way"):
        DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


def test_sweep_removes_what_killed_steps_left(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out/0001")
    left = tmp_path / "out" / f".0002.1234{layout.PARTIAL}"
    left.mkdir()
    (left / "half").write_text("half")
    assert sweep_partials(tmp_path) == [left]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["0001"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "data/result.txt").unlink(), "result.txt is missing"),
        (lambda folder: (folder / "data/result.txt").write_text("80"), "has 2 bytes, its manifest says 1"),
        (lambda folder: (folder / layout.MANIFEST).write_text("{"), "is not a manifest"),
        (lambda folder: (folder / layout.MANIFEST).write_text(""), "is not a manifest"),
    ],
)
def test_damage_is_noticed_at_once(tmp_path: Path, damage: Any, message: str) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    damage(tmp_path / "out")
    with pytest.raises(CorruptArtifact, match=message):
        DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    assert verify(tmp_path / "out").artifact["result"] == 8
    (tmp_path / "out/data/result.txt").write_text("9")
    with pytest.raises(CorruptArtifact, match="sha256"):
        verify(tmp_path / "out")


def test_verify_refuses_strangers_and_unfinished_folders(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    (tmp_path / "out/new.txt").write_text("")
    with pytest.raises(CorruptArtifact, match=r"new\.txt"):
        verify(tmp_path / "out")
    with pytest.raises(CorruptArtifact, match="never finished"):
        verify(tmp_path / "nothing")


def test_the_manifest_says_who_and_when(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.versions["python"].startswith("3.")
    assert manifest.inputs == {"number": 4}
    assert list(manifest.files) == ["data/result.txt"]


def test_what_differs_between_attempts_is_measured_not_stated(tmp_path: Path) -> None:
    def measure(inputs: DoubleInputs, workspace: Workspace) -> dict[str, Any]:
        workspace.measured["tokens_per_second"] = 3.5
        return double(inputs, workspace)

    Step("double", DoubleInputs, Doubled, measure).run(DoubleInputs(number=4), tmp_path, "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.measured == {"tokens_per_second": 3.5}


def run_command(root: Path, inputs: str) -> subprocess.CompletedProcess[str]:
    file = root / "inputs.json"
    file.write_text(inputs)
    command = [sys.executable, "-m", "steps.collate", "--root", str(root), "--path", "batch", "--inputs", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("{", "inputs.json"),
        ('{"iteration": "first"}', "iteration: Input should be a valid integer"),
        ('{"iteration": 0, "colour": 1}', "colour"),
    ],
)
def test_wrong_inputs_exit_with_202_and_one_line(tmp_path: Path, inputs: str, message: str) -> None:
    done = run_command(tmp_path, inputs)
    assert done.returncode == DO_NOT_RETRY
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr or "iteration" in done.stderr


def test_a_full_disk_is_one_line_and_may_be_retried(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/demo/x")

    assert exit_status_of(write) == 1
    assert capsys.readouterr().err == "error: can't write /runs/demo/x: No space left on device\n"


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_status_of(lambda: 1 / 0)


def test_manifests_are_readable_json(tmp_path: Path) -> None:
    DOUBLE.run(DoubleInputs(number=4), tmp_path, "out")
    assert json.loads((tmp_path / "out" / layout.MANIFEST).read_text())["artifact"] == {"result": 8}
