"""Steps as deployment runs: the contract of runtimes, kept by a worker that knows the runs folder by another path."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL
from test_runtimes import ODD, ODD_STEP, OddInputs, gone, play, wait_for
from vllm_fixtures import checkpoint, tiny_inputs

from flows import step as worker_side
from flows.runtimes import PoolSettings, make_runtime
from flows.runtimes.deployment_runs import look_at
from flows.runtimes.pool import PoolRuntime
from steps.common.errors import InvalidInputs, StepFailed
from steps.common.runs import RUNS
from steps.serving.adapters import load_adapter
from steps.serving.endpoint import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Prefect's own clients are collected rather than closed.
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]

POOL = "machines"
DEPLOYMENTS = {"step/flow": "run_step", "step/train": "run_step", "serve/model": "serve_model", "step/idle": "run_step"}
EXTENDED = "import steps; steps.__path__.append({folder!r})"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Iterator[Path]:
    """A runs folder, and a worker of a process pool that has it mounted elsewhere. It knows the step `odd`."""
    folder = tmp_path_factory.mktemp("machines")
    (folder / "runs").mkdir()
    (folder / "mounted").symlink_to("runs")
    (folder / "path").mkdir()
    (folder / "path/sitecustomize.py").write_text(EXTENDED.format(folder=str(folder / "path")))
    (folder / "path/odd.py").write_text(ODD_STEP)
    deploy()
    with worker(folder) as process:
        yield folder / "runs"
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def deploy() -> None:
    """What `prefect deploy` does for these; `step/idle` is on a pool that no worker serves."""
    with get_client(sync_client=True) as client:
        for pool in (POOL, "idle"):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        for name, function in DEPLOYMENTS.items():
            of, deployment = name.split("/")
            client.create_deployment(
                flow_id=client.create_flow_from_name(of),
                name=deployment,
                entrypoint=f"flows.step.{function}",
                work_pool_name="idle" if deployment == "idle" else POOL,
            )


def worker(folder: Path, pool: str = POOL) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(folder / "path"),
        RUNS: str(folder / "mounted"),
    }
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
    ]
    with (folder / "worker.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)


@pytest.fixture
def pool(machines: Path, request: pytest.FixtureRequest) -> Iterator[PoolRuntime]:
    root = machines / request.node.name.partition("[")[0]
    root.mkdir(exist_ok=True)
    with closing(PoolRuntime(root, PoolSettings(type="pool", poll=0.3))) as runtime:
        yield runtime


def test_a_step_runs_elsewhere_and_leaves_its_artifact(pool: PoolRuntime) -> None:
    said: list[str] = []
    env = pool.root / "logs/odd/odd-well.env"
    seen: list[int] = []

    def say(line: str) -> None:
        said.append(line)
        if env.exists():
            seen.append(stat.S_IMODE(env.stat().st_mode))

    made = pool.run(ODD, OddInputs(how="well"), "odd/well", env={"ODD_POLICY": "x"}, timeout=60, say=say)
    assert (made.how, made.policy) == ("well", "x")
    assert said == ["at work well"]
    assert seen == [0o600]
    assert not env.exists()


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("refuse", InvalidInputs, "^the inputs are odd$"),
        ("fault", StepFailed, "^odd/fault: the server is gone .exit status 1, log .*odd-fault.log.$"),
        ("signal", StepFailed, "odd/signal: was killed by SIGSEGV .exit status -11"),
    ],
)
def test_failures_are_told_apart(pool: PoolRuntime, how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        play(pool, how, [], timeout=60)
    assert not (pool.root / "odd" / how).exists()


def test_a_step_that_takes_too_long_is_killed(pool: PoolRuntime) -> None:
    with pytest.raises(StepFailed, match="was stopped after 5 s, its time limit"):
        play(pool, "hang", [], timeout=5)
    assert gone(int((pool.root / "pid").read_text()))


def test_the_end_of_the_flow_ends_its_steps(pool: PoolRuntime) -> None:
    ends: list[Exception] = []

    def hang() -> None:
        try:
            play(pool, "hang", [], timeout=100)
        except StepFailed as error:
            ends.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    wait_for((pool.root / "pid").exists, 60)
    (id,) = pool._active
    pool.close()
    thread.join(60)
    assert "its run was cancelled" in str(ends[0])
    assert look_at(id).state.is_cancelled()  # type: ignore[union-attr]
    wait_for(lambda: gone(int((pool.root / "pid").read_text())), 15)
    with pytest.raises(InvalidInputs, match="the flow has ended"):
        play(pool, "well", [])


def test_what_a_killed_flow_left_is_ended_but_for_training(pool: PoolRuntime) -> None:
    trains, plays = (left_behind(pool, "step/idle", step) for step in ("train", "odd"))
    with closing(make_runtime(PoolSettings(type="pool"), pool.root)) as after:
        assert after.at_work == {"odd/train"}
        assert look_at(plays).state.is_cancelled()  # type: ignore[union-attr]
        assert isinstance(after, PoolRuntime)
        assert after._adopted(OddInputs(how="train"), "odd/train", print) == trains
    assert look_at(trains).state.is_cancelled()  # type: ignore[union-attr]


def left_behind(pool: PoolRuntime, deployment: str, step: str) -> UUID:
    parameters = {"run": pool.root.name, "step": step, "path": f"odd/{step}", "timeout": 9}
    tags = [pool._tag, OddInputs(how=step).fingerprint()]
    run: Any = run_deployment(deployment, parameters=parameters, timeout=0, tags=tags)
    id: UUID = run.id
    return id


def test_nobody_to_work_is_said(pool: PoolRuntime) -> None:
    idle = PoolSettings(type="pool", flow="step/idle", start_timeout=1)
    with (
        closing(PoolRuntime(pool.root, idle)) as runtime,
        pytest.raises(StepFailed, match=r"odd/well: no worker took it in 1 s"),
    ):
        play(runtime, "well", [])
    missing = PoolSettings(type="pool", flow="step/nowhere")
    with (
        closing(PoolRuntime(pool.root, missing)) as runtime,
        pytest.raises(InvalidInputs, match="Prefect has no deployment step/nowhere"),
    ):
        play(runtime, "well", [])


def test_a_machine_without_the_run_says_so(machines: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with (
        closing(PoolRuntime(tmp_path / "elsewhere", PoolSettings(type="pool", poll=0.3))) as runtime,
        pytest.raises(InvalidInputs, match=r"there is no .*mounted/elsewhere on .*set NIGHTSCHOOL_RUNS"),
    ):
        play(runtime, "well", [], timeout=60)


@flow
def short() -> str:
    from prefect.runtime import flow_run

    return str(flow_run.id)


def test_a_server_ends_with_the_flow_it_is_for(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = short()
    monkeypatch.setattr(worker_side, "LOOKS", 0.0)
    monkeypatch.setattr(worker_side, "flow_run", SimpleNamespace(get_parent_flow_run_id=lambda: ended))
    state = worker_side.watch(SimpleNamespace(alive=lambda: True))  # type: ignore[arg-type]
    assert state.message == "the flow that asked for it has ended"


def test_a_server_is_found_at_its_own_address(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_side.own_address() == "127.0.0.1"  # the API is here, and so is all else
    monkeypatch.setenv("NIGHTSCHOOL_SERVE_ADDRESS", "gpu-7.example")
    assert worker_side.own_address() == "gpu-7.example"


def test_steps_are_runs_below_the_flow(pool: PoolRuntime) -> None:
    @task
    def one(how: str) -> str:
        return play(pool, how, [], timeout=60).how

    @flow
    def several() -> list[str]:
        return one.map(["well", "again"]).result()

    assert several() == ["well", "again"]
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"tags": {"all_": [pool._tag]}}),
        )
    assert {run.name for run in runs} == {"odd odd/well", "odd odd/again"}
    assert all(run.parent_task_run_id for run in runs)


@pytest.mark.serve
def test_a_model_is_served_from_a_pool(pool: PoolRuntime, tiny_run: Path) -> None:
    (pool.root / "model").symlink_to(tiny_run / "model")
    (pool.root / "checkpoints").symlink_to(tiny_run / "checkpoints")
    service = pool.serve(tiny_inputs(), print)
    endpoint = Endpoint.read(service.endpoint)
    assert endpoint and service.alive()
    wanted = checkpoint(pool.root / "checkpoints/0001", pool.root, 1)
    assert load_adapter(endpoint, pool.root, wanted).verdict.answers_as == "checkpoint"
    service.stop()
    assert not service.alive()
    time.sleep(0.5)
    assert gone(endpoint.pid)
