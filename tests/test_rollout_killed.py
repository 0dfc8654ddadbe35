"""The rollout step as a process: killed, out of disk, or without a server."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_fixtures import QUICK, rollout_inputs, stub
from stub_server import StubServer

from environments import Trajectory
from steps.agent.shard import SUFFIX
from steps.common import layout, tables
from steps.common.settings import EnvironmentSettings
from steps.common.step import sweep_partials

__all__ = ["stub"]
PATH = layout.rollouts(3, 1)
TALK = EnvironmentSettings(name="agents:Talk", options={"count": 6})
INPUTS = rollout_inputs(TALK, limits=QUICK.model_copy(update={"concurrency": 2, "request_retries": 0}))


def start(root: Path, stub: StubServer, **environment: str) -> subprocess.Popen[str]:
    root.mkdir(exist_ok=True)
    inputs = root.parent / f"{root.name}.json"
    inputs.write_text(INPUTS.model_dump_json())
    command = [sys.executable, "-m", "steps.rollout", "--root", str(root), "--path", PATH, "--inputs", str(inputs)]
    tests = str(Path(__file__).parent)
    variables = {**os.environ, **stub.environment, "PYTHONPATH": tests, **environment}
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


def asked(stub: StubServer) -> Counter[str]:
    """Requests by task."""
    return Counter(request["messages"][0]["content"].split(":")[0] for request in stub.requests)


def played(root: Path) -> list[Trajectory]:
    frame = tables.read([root / PATH / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    groups = tables.groups_of_frame(frame.with_columns(seconds=0.0))
    return [trajectory for group in groups for trajectory in group.trajectories]


@pytest.mark.slow
def test_a_killed_shard_plays_only_what_was_not_finished(stub: StubServer, tmp_path: Path) -> None:
    assert finish(start(tmp_path / "whole", stub))[0] == 0
    once = asked(stub)
    stub.requests.clear()
    stub.delay = 0.1
    root = tmp_path / "killed"
    process = start(root, stub)
    wait_for_groups(root, 2)
    process.send_signal(signal.SIGKILL)
    finish(process)
    [folder] = root.rglob(f".*{SUFFIX}")
    finished = {f"train-{int(file.stem)}" for file in folder.glob("*.parquet")}
    assert 2 <= len(finished) < 6

    stub.delay = 0
    code, out, error = finish(start(root, stub))
    assert (code, error) == (0, "")
    assert f"{len(finished)} of 6 groups are finished already" in out
    counts = asked(stub)
    assert {task: counts[task] for task in finished} == {task: once[task] for task in finished}
    assert played(root) == played(tmp_path / "whole")
    assert not folder.exists()
    sweep_partials(root)
    assert list(root.rglob(".*")) == []


def wait_for_groups(root: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(root.rglob(f".*{SUFFIX}/*.parquet"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_server_that_is_gone_may_be_tried_again(stub: StubServer, tmp_path: Path) -> None:
    gone = {"NIGHTSCHOOL_POLICY_URL": "http://127.0.0.1:1/v1"}
    code, _, error = finish(start(tmp_path / "run", stub, **gone))
    assert code == 1
    assert error.startswith("error: the policy's server can't be reached (http://127.0.0.1:1/v1/chat/completions)")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_no_address_is_not_worth_trying_again(stub: StubServer, tmp_path: Path) -> None:
    code, _, error = finish(start(tmp_path / "run", stub, NIGHTSCHOOL_POLICY_KEY=""))
    assert code == 202
    assert error.startswith("error: NIGHTSCHOOL_POLICY_KEY not set")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("can't mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_loses_nothing(stub: StubServer, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(220 << 10))
    code, _, error = finish(start(small_disk / "run", stub))
    assert code == 1
    assert error.startswith("error: can't write")
    assert error.endswith("No space left on device\n")
    assert error.count("\n") == 1
    assert list(small_disk.rglob("*.partial")) == []
    finished = len(list(small_disk.rglob("*.parquet")))
    ballast.unlink()
    code, out, _ = finish(start(small_disk / "run", stub))
    assert code == 0
    assert finished == 0 or f"{finished} of 6 groups are finished already" in out
