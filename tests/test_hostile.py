"""Agents that ruin their process: each is a failed rollout of a stated kind, and all others get their results."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rollout_fixtures import QUICK, evaluate_inputs, rollout_inputs, stub
from stub_server import StubServer

from environments import Trajectory
from steps.agent.keeper import descendants
from steps.common import layout, tables
from steps.common.artifacts import read_manifest
from steps.common.errors import StepFailed, TooManyFailures
from steps.common.settings import EnvironmentSettings
from steps.evaluate import EVALUATE
from steps.rollout import ROLLOUT, RolloutInputs

__all__ = ["stub"]
PATH = layout.rollouts(3, 1)
STRICT = QUICK.model_copy(
    update={
        "block_timeout": 1.0,
        "calls": 20,
        "output_bytes": 1 << 16,
        "open_files": 60,
        "processes": 10,
        "agent_retries": 0,
    }
)
FAILURES = {
    "sleeps": "Blocked",
    "spins": "Blocked",
    "waits": "RolloutTimeout",
    "exits": "ProcessKilled",
    "kills": "ProcessKilled",
    "crashes": "ProcessKilled",
    "interrupts": "ProcessKilled",
    "cancels_all": "ProcessKilled",
    "prints": "TooMuchOutput",
    "shouts": "TooMuchOutput",
    "forks": "TooManyProcesses",
    "opens": "TooManyFiles",
    "connects": "TooManyFiles",
    "hoards": "BadReward",
    "loses_count": "BadReward",
    "measures_infinity": "BadMetric",
    "circles": "ValueError",
    "cheats": "TaskChanged",
    "asks_on": "TooManyCalls",
    "asks_whatever_comes": "TooManyCalls",
}
MESSAGES = {
    "sleeps": "the agent let nothing else run for 1 s: rollout.limits.block_timeout",
    "shouts": "the agent printed more than 65,536 bytes: rollout.limits.output_bytes",
    "forks": "the agent has more than 10 processes running: rollout.limits.processes",
    "connects": "the agent has more than 60 files and sockets open: rollout.limits.open_files",
    "exits": "the agent's process ended with status 3",
    "kills": "the agent's process ended by signal 9: by the agent, or since the machine ran out of memory",
    "crashes": "the agent's process ended by signal 11",
    "hoards": "the reward is 1e+308, no number of at most ±1,000,000",
    "asks_on": "a rollout may call the model 20 times: rollout.limits.calls (HTTP 403)",
}
HARMLESS = ["splits", "leaves_a_child"]


@pytest.fixture
def served(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> StubServer:
    for name, value in stub.environment.items():
        monkeypatch.setenv(name, value)
    return stub


def hostile(folder: Path, ways: Sequence[str], **options: int) -> EnvironmentSettings:
    folder.mkdir(exist_ok=True)
    return EnvironmentSettings(name="hostile:Hostile", options={"ways": list(ways), "folder": str(folder), **options})


def shard(environment: EnvironmentSettings, **limits: float) -> RolloutInputs:
    strict = STRICT.model_copy(update=limits)
    return rollout_inputs(environment, limits=strict, group_size=1, max_failed_fraction=1)


def played(root: Path) -> dict[str, Trajectory]:
    frame = tables.read([root / PATH / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    return {t.task_id: t for group in tables.groups_of_frame(frame) for t in group.trajectories}


def left_behind(folder: Path) -> list[str]:
    """Processes that agents have noted, and that still run."""
    return [file.name for file in folder.iterdir() if Path("/proc", file.read_text(), "stat").exists()]


@pytest.mark.slow
def test_each_way_to_ruin_a_process_is_a_failed_rollout_and_nobody_elses(
    served: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "noted"
    ROLLOUT.run(shard(hostile(noted, [])), tmp_path, layout.rollouts(3, 0))  # Polars opens what it needs.
    open_before, others_before = len(list(Path("/proc/self/fd").iterdir())), set(descendants(os.getpid()))
    rollouts = ROLLOUT.run(shard(hostile(noted, [*FAILURES, *HARMLESS])), tmp_path, PATH)
    trajectories = played(tmp_path)
    assert {name: t.failure.type for name, t in trajectories.items() if t.failure} == FAILURES
    assert rollouts.failures == Counter(FAILURES.values())
    for name, message in MESSAGES.items():
        failure = trajectories[name].failure
        assert failure and failure.message == message
    others = {name: t for name, t in trajectories.items() if name not in FAILURES}
    assert sorted(others) == sorted([*HARMLESS, *(f"innocent-{i}" for i in range(6))])
    assert all(
        t.reward == 1.0 and t.turns == (2 if name == "splits" else 1 if name in HARMLESS else 4)
        for name, t in others.items()
    )
    assert "from the child" not in {request["messages"][0]["content"] for request in served.requests}

    where = trajectories["spins"].failure
    assert where and "tests/hostile.py" in where.traceback and "in spins" in where.traceback
    assert len(list(noted.iterdir())) > 2
    assert left_behind(noted) == []
    assert set(descendants(os.getpid())) <= others_before
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    out, error = capsys.readouterr()
    assert len(out) + len(error) < 12 * STRICT.output_bytes, "what floods the log is cut"
    assert "bytes more were printed, and are not shown" in out
    manifest = read_manifest(tmp_path / PATH)
    assert manifest and manifest.measured["killed_workers"] >= 13


def test_an_agent_that_kills_its_process_gets_its_fresh_tries(served: StubServer, tmp_path: Path) -> None:
    environment = hostile(tmp_path / "noted", ["kills_once", "exits"])
    rollouts = ROLLOUT.run(shard(environment, agent_retries=1), tmp_path, PATH)
    assert rollouts.failures == {"ProcessKilled": 1}
    assert played(tmp_path)["kills_once"].reward == 1
    seeds = [r["seed"] for r in served.requests if r["messages"][0]["content"] == "exits"]
    assert (len(seeds), len(set(seeds))) == (3, 2), "among others, alone, and alone with another seed"


def test_what_was_played_before_a_kill_is_kept(served: StubServer, tmp_path: Path) -> None:
    rollouts = ROLLOUT.run(shard(hostile(tmp_path / "noted", ["kills"]), concurrency=1), tmp_path, PATH)
    assert (rollouts.trajectories, rollouts.failed) == (7, 1)
    asked = Counter(request["messages"][0]["content"].split(":")[0] for request in served.requests)
    assert asked == {"kills": 2} | {f"innocent-{i}": 4 for i in range(6)}


def test_hostile_agents_above_the_allowance_stop_the_shard(served: StubServer, tmp_path: Path) -> None:
    inputs = shard(hostile(tmp_path / "noted", ["exits"])).model_copy(update={"max_failed_fraction": 0})
    others_before = set(descendants(os.getpid()))
    with pytest.raises(TooManyFailures, match=r"1 of 7 .* ProcessKilled: the agent's process ended with status 3"):
        ROLLOUT.run(inputs, tmp_path, PATH)
    assert set(descendants(os.getpid())) <= others_before


def test_evaluations_are_protected_alike(served: StubServer, tmp_path: Path) -> None:
    settings = hostile(tmp_path / "noted", ["exits"])
    evaluation = EVALUATE.run(
        evaluate_inputs(settings, limits=STRICT, max_failed_fraction=1), tmp_path, "evaluations/0003"
    )
    assert (evaluation.failures, evaluation.reward) == ({"ProcessKilled": 1}, 1.0)


def test_an_environment_that_never_gets_to_play_fails_the_step(served: StubServer, tmp_path: Path) -> None:
    inputs = rollout_inputs(EnvironmentSettings(name="hostile:Unloadable"))
    with pytest.raises(StepFailed, match="ended before any rollout: the agent's process ended with status 7"):
        ROLLOUT.run(inputs, tmp_path, PATH)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ways"), [(signal.SIGKILL, ["forks", "sleeps"]), (signal.SIGINT, ["forks"])])
def test_nothing_outlives_a_step_that_is_ended(
    stub: StubServer, tmp_path: Path, number: signal.Signals, ways: Sequence[str]
) -> None:
    noted, file = tmp_path / "noted", tmp_path / "inputs.json"
    inputs = shard(hostile(noted, ways), processes=100, block_timeout=60)
    file.write_text(inputs.model_dump_json())
    command = [sys.executable, "-m", "steps.rollout", "--root", str(tmp_path), "--path", PATH, "--inputs", str(file)]
    variables = {**os.environ, **stub.environment, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(noted.iterdir())) == 30)
    family = descendants(process.pid)
    assert len(family) > 30
    process.send_signal(number)
    process.wait(timeout=20)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
