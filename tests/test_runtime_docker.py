"""Steps in containers: the runtime's contract, its limits, what a kill leaves, what the next flow takes up again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from docker_fixtures import TESTS, caged_image, engine, ours, play, runtime_at, wait_for

from flows.runtimes.containers import device_requests, sweep_runs
from flows.runtimes.docker import DockerRuntime, python
from flows.runtimes.docker_settings import ContainerSettings, DockerSettings
from steps.common.errors import InvalidInputs, StepFailed
from steps.common.gpus import require
from steps.common.rewind import Rewind, rewind
from steps.common.step import sweep_partials

__all__ = ["caged_image", "engine", "runtime_at"]
in_containers = pytest.mark.docker
MakeRuntime = Callable[..., DockerRuntime]


@pytest.fixture
def runtime(runtime_at: MakeRuntime, tmp_path: Path) -> DockerRuntime:
    return runtime_at(tmp_path / "run", memory="200m", pids=30, shm="16m", tmp="32m")


# The contract


@in_containers
def test_a_step_runs_in_a_container_and_leaves_its_artifact(runtime: DockerRuntime, engine: Any) -> None:
    said: list[str] = []
    assert play(runtime, "well", said=said) == {}
    assert said == ["at work: well", "line 0", "line 1", "line 2"]
    assert (runtime.root / "logs/group/caged-well.log").read_text().splitlines() == said
    assert ours(engine, runtime.root) == []
    assert (runtime.root / "caged/well/manifest.json").stat().st_uid == runtime.root.stat().st_uid
    assert play(runtime, "well") == {}, "what is there is returned"


@in_containers
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("refuse", InvalidInputs, "^the inputs are odd$"),
        ("fault", StepFailed, "^caged/fault: the server is gone .exit status 1, log .*caged-fault.log.$"),
        ("crash", StepFailed, "caged/crash: RuntimeError: a bug .exit status 1"),
        ("segfault", StepFailed, "caged/segfault: was killed by SIGSEGV .exit status -11"),
        ("killed", StepFailed, "caged/killed: was killed by SIGKILL: perhaps .* .exit status -9"),
        ("eat 400", StepFailed, "caged/eat: ran out of memory, at its limit of 200 MiB .exit status -9"),
    ],
)
def test_failures_are_told_apart(
    runtime: DockerRuntime, engine: Any, how: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        play(runtime, how)
    assert not (runtime.root / "caged" / how.split()[0]).exists()
    assert ours(engine, runtime.root) == []


@in_containers
def test_a_step_that_takes_too_long_is_killed(runtime: DockerRuntime, engine: Any) -> None:
    began = time.monotonic()
    with pytest.raises(StepFailed, match="was stopped after 4 s, its time limit"):
        play(runtime, "nap 60", timeout=4.0)
    assert time.monotonic() - began < 15
    assert ours(engine, runtime.root) == []


@in_containers
def test_closing_ends_what_runs_and_starts_nothing_more(runtime: DockerRuntime, engine: Any) -> None:
    """This is what cancelling a flow comes to."""
    failures: list[Exception] = []

    def work() -> None:
        try:
            play(runtime, "nap 60")
        except StepFailed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: (runtime.root / "caged/attempts").exists())
    began = time.monotonic()
    runtime.close()
    thread.join(15)
    assert time.monotonic() - began < 15
    assert len(failures) == 1
    assert ours(engine, runtime.root) == []
    with pytest.raises(InvalidInputs, match="the flow has ended"):
        play(runtime, "well")


@in_containers
def test_what_is_missing_is_told(
    runtime_at: MakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    settings = DockerSettings(type="docker", rollout=ContainerSettings(image="nightschool-test/none"))
    missing = pytest.raises(InvalidInputs, match=r"no image nightschool-test/none on this machine: run `make images`")
    with closing(DockerRuntime(tmp_path, settings)) as runtime, missing:
        play(runtime, "well")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(InvalidInputs, match=r"no Docker engine answers .*tools/engine start"):
        runtime_at(tmp_path / "run")


# Limits


@in_containers
def test_a_container_may_do_as_little_as_possible(runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = play(runtime, "look")
    owner = runtime.root.stat()
    assert found["user"] == [owner.st_uid, owner.st_gid]
    assert found["capabilities"] == 0
    assert found["no_new_privileges"]
    assert found["writable"] == ["/tmp", "/dev/shm"]
    assert found["shm"] == 16 << 20
    assert found["interfaces"] == ["lo"]
    image = {"PATH", "HOME", "HOSTNAME", "USER", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
    assert set(found["environment"]) - image <= {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "LC_CTYPE"}


@in_containers
def test_processes_are_limited(runtime: DockerRuntime) -> None:
    assert 5 < play(runtime, "fork 100")["children"] < 30


@in_containers
@pytest.mark.parametrize("name, failures", [("rollout", True), ("group", False)])
def test_a_step_writes_beside_its_artifact_only(runtime: DockerRuntime, name: str, failures: bool) -> None:
    root = runtime.root
    (root / "checkpoints").mkdir()
    may = {str(root): False, str(root / "checkpoints"): False, str(root / "logs"): False, str(root / "caged"): True}
    found = play(runtime, " ".join(["write", *may, str(root / "logs/failed")]), name)
    assert found == may | {str(root / "logs/failed"): failures}


# Left by the killed

FLOW = """
import sys
from pathlib import Path
from docker_fixtures import CAGED, CagedInputs, caged
from flows.runtimes import docker
from flows.runtimes.docker_settings import ContainerSettings, DockerSettings
docker.module_of = lambda step: "caged_step"
container = ContainerSettings(image=CAGED)
runtime = docker.DockerRuntime(Path(sys.argv[1]), DockerSettings(type="docker", rollout=container, train=container))
_, _, step, how, path = sys.argv
runtime.run(caged(step), CagedInputs(how=how), path, env={}, timeout=60, say=print)
"""


def killed_flow(root: Path, step: str, how: str, path: str = "caged/nap") -> None:
    """A flow that is killed while its step is at work."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(root), step, how, path], env=environment)
    try:
        wait_for((root / path).with_name("attempts").exists)
    finally:
        flow.send_signal(signal.SIGKILL)
        flow.wait()


@in_containers
def test_what_a_killed_flow_left_is_removed_by_the_next(runtime_at: MakeRuntime, engine: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    killed_flow(root, "rollout", "nap 50")
    left = ours(engine, root)
    assert len(left) == 2, "a container and its network"
    other = runtime_at(tmp_path / "other")
    assert ours(engine, root) == left, "another run's are let be"
    other.close()
    assert runtime_at(root).at_work == frozenset()
    assert ours(engine, root) == []


@in_containers
def test_down_removes_what_is_left_of_all_runs(caged_image: str, engine: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "night"
    root.mkdir(parents=True)
    killed_flow(root, "train", "nap 50")
    assert sweep_runs(tmp_path / "elsewhere") == 0
    assert sweep_runs(tmp_path / "runs") == 1
    assert ours(engine, root) == []


@in_containers
def test_training_is_taken_up_again_where_it_is(runtime_at: MakeRuntime, engine: Any, tmp_path: Path) -> None:
    root, said = tmp_path / "run", []
    root.mkdir()
    killed_flow(root, "train", "nap 8")
    runtime = runtime_at(root)
    assert runtime.at_work == {"caged/nap"}
    assert sweep_partials(root, spare=runtime.at_work) == []
    assert play(runtime, "nap 8", "train", said=said) == {}
    assert said[0].startswith("caged/nap: its container goes on since 20")
    assert said[1:] == ["at work: nap"]
    assert (root / "caged/attempts").read_text() == "nap\n", "it was not done again"
    assert ours(engine, root) == []


@in_containers
def test_training_on_other_inputs_is_not_taken_up(runtime_at: MakeRuntime, engine: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    killed_flow(root, "train", "nap 50")
    runtime = runtime_at(root)
    assert play(runtime, "nap 1", "train") == {}
    assert (root / "caged/attempts").read_text() == "nap\nnap\n"
    assert ours(engine, root) == []


@in_containers
def test_training_that_a_rewind_gave_up_is_ended(runtime_at: MakeRuntime, engine: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "iterations/0000/groups").mkdir(parents=True)
    killed_flow(root, "train", "nap 50", "checkpoints/0001")
    rewind(root, Rewind(iteration=0, step="group"))
    assert not list(root.glob("checkpoints/.*.partial"))
    runtime = runtime_at(root)
    assert runtime.at_work == frozenset()
    assert ours(engine, root) == []


@in_containers
def test_training_that_a_rewind_does_not_concern_goes_on(runtime_at: MakeRuntime, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "evaluations/0000").mkdir(parents=True)
    killed_flow(root, "train", "nap 50", "checkpoints/0001")
    rewind(root, Rewind(iteration=0, step="evaluate"))
    assert runtime_at(root).at_work == {"checkpoints/0001"}


# GPUs


@in_containers
def test_an_engine_without_gpus_says_so(tmp_path: Path, caged_image: str, engine: Any) -> None:
    if "nvidia" in engine.info()["Runtimes"]:
        pytest.skip("this engine hands out GPUs")
    settings = DockerSettings(type="docker", train=ContainerSettings(image=caged_image), gpus="all")
    with closing(DockerRuntime(tmp_path, settings)) as runtime:
        with pytest.raises(StepFailed, match=r"the engine can't start .*could not select device driver"):
            play(runtime, "well", "train")
        assert ours(engine, tmp_path) == []


def test_gpus_are_asked_for_as_docker_run_does() -> None:
    assert device_requests(None) == []
    (every,), (two,), (named,) = device_requests("all"), device_requests(2), device_requests(["0", "GPU-1"])
    assert (every.count, two.count, named.device_ids) == (-1, 2, ["0", "GPU-1"])
    assert all(request.capabilities == [["gpu", "compute", "utility"]] for request in (every, two, named))
    assert python(["0", "3"]) == ["python", "-m", "steps.common.gpus", "2"]
    assert python(None) == ["python", "-m"]


@pytest.mark.parametrize(
    ("wanted", "here", "enough"), [("all", 1, True), ("all", 0, False), ("2", 1, False), ("2", 2, True)]
)
def test_a_step_that_misses_its_gpus_says_so(tmp_path: Path, wanted: str, here: int, enough: bool) -> None:
    for number in range(here):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    if enough:
        require(wanted, tmp_path)
    else:
        with pytest.raises(InvalidInputs, match=f"asks for {wanted} and {here} are here"):
            require(wanted, tmp_path)
