"""Steps on machines that share nothing but a bucket: two folders of runs, a worker that knows one, a flow the other.

Group and collate are the real steps; who trains is a small one. Prefect and the S3 server are real.
The worker's requests pass a proxy, which counts them.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from learning_step import LEARN, LearnInputs
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from run_fixtures import group_of, store_rollouts
from s3_fixtures import Proxy, Weed, make, tree
from test_runtime_pool import EXTENDED, worker
from vllm_fixtures import tiny_inputs

from flows.runtimes.places import PLACES
from flows.runtimes.pool import PoolRuntime
from flows.runtimes.pool_settings import PoolSettings
from steps.backup import backup
from steps.collate import COLLATE, CollateInputs
from steps.common import layout
from steps.common.artifacts import Batch, Checkpoint, read_manifest, verify
from steps.common.errors import StepFailed
from steps.common.rewind import Rewind, rewind
from steps.common.runs import RunRecord, write_record
from steps.common.settings import EnvironmentSettings
from steps.common.step import ArtifactT, Inputs, InputsT, Step, Workspace
from steps.group import GROUP, GroupInputs
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteRun
from steps.remote.settings import BucketSettings
from steps.restore import restore
from steps.serving.adapters import load_adapter
from steps.serving.endpoint import Endpoint

# Prefect's own clients are collected rather than closed.
pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::ResourceWarning")]

SETTINGS = PoolSettings(
    type="pool", shared_disk=False, flow="step/apart", train="step/apart", serve="serve/apart", poll=0.3
)
KEY = "key-of-the-policy-that-prefect-must-not-see"
TRAINS = "from flows.runtimes.places import PLACES\nPLACES['learn'] = 'train'\n"


@dataclass
class Machines:
    """The flow's folder of the run, the worker's, and what the steps said."""

    root: Path
    other: Path
    said: list[str] = field(default_factory=list)

    def run(
        self, runtime: PoolRuntime, step: Step[InputsT, ArtifactT], inputs: InputsT, path: str, **env: str
    ) -> ArtifactT:
        env = {"NIGHTSCHOOL_POLICY_KEY": KEY, **env}
        return runtime.run(step, inputs, path, env=env, timeout=100, say=self.said.append)

    def runtime(self) -> Any:
        return closing(PoolRuntime(self.root, SETTINGS))

    def begin(self) -> Checkpoint:
        """A run with a model, a first checkpoint, and what that has played."""
        write_record(self.root, RunRecord(config={}, versions={}))
        make(self.root, layout.MODEL)
        return make(self.root, layout.checkpoint(0))


@pytest.fixture(scope="module")
def deployed(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="apart", type="process"))
        client.create_deployment(
            flow_id=client.create_flow_from_name("step"),
            name="apart",
            entrypoint="flows.step.run_step",
            work_pool_name="apart",
        )
        client.create_deployment(
            flow_id=client.create_flow_from_name("serve"),
            name="apart",
            entrypoint="flows.step.serve_model",
            work_pool_name="apart",
        )


@pytest.fixture
def machines(
    deployed: None, tmp_path: Path, weed: Weed, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machines]:
    """A flow's machine, and a worker's, which asks the bucket through the proxy."""
    monkeypatch.setitem(PLACES, "learn", "train")
    monkeypatch.setenv("NIGHTSCHOOL_TRAIN_PYTHON", sys.executable)
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(EXTENDED.format(folder=str(tmp_path / "path")) + "\n" + TRAINS)
    shutil.copy(Path(__file__).with_name("learning_step.py"), tmp_path / "path/learn.py")
    with worker(tmp_path, "apart") as process:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", weed.url)
        yield Machines(tmp_path / "runs/night", tmp_path / "mounted/night")
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def finished(place: BucketSettings) -> list[str]:
    """Paths of the artifacts in the bucket, without what was set aside and receipts."""
    paths = RemoteRun(Bucket(place), "night").finished()
    return [path for path in paths if not path.startswith((layout.SUPERSEDED, "backups"))]


def here(root: Path) -> list[str]:
    found = (file.parent.relative_to(root).as_posix() for file in root.rglob(layout.MANIFEST))
    return sorted(path for path in found if not path.startswith((layout.SUPERSEDED, "backups")))


def read_of_artifacts(proxy: Proxy) -> list[str]:
    """What was downloaded, but for letters."""
    gets = [line.removeprefix("GET ") for line in proxy.seen if line.startswith("GET ") and "list-type" not in line]
    return [line for line in gets if f"/{layout.LOGS}/" not in line]


@pytest.mark.slow
def test_machines_that_share_a_bucket_only_make_a_run(machines: Machines, place: BucketSettings, proxy: Proxy) -> None:
    first = machines.begin()
    played = [store_rollouts(machines.root, [group_of(f"task-{i}", [0.0, 1.0])], shard=i) for i in range(2)]
    environment = EnvironmentSettings(name="tic_tac_toe")
    with machines.runtime() as runtime:
        inputs = GroupInputs(iteration=0, rollouts=played, environment=environment)
        groups = machines.run(runtime, GROUP, inputs, layout.groups(0))
        batch = machines.run(
            runtime, COLLATE, CollateInputs(iteration=0, groups=groups, rollouts=played), layout.batch(0)
        )
        second = learn(machines, runtime, first, batch)
        assert batch.sequences == 4
        assert f"learns from {layout.batch(0)} with a key of {len(KEY)}" in machines.said
        assert "learns from" in (machines.root / layout.log("learn", second.path)).read_text()
        for path in (groups.path, batch.path, second.path):
            assert verify(machines.root / path) == verify(machines.other / path)
        assert here(machines.other) == here(machines.root) == finished(place)
        assert not list(Bucket(place).list(place.key("night", "logs/")))
        assert not list((machines.other / "logs").rglob("*.env"))
        assert KEY not in str(runs_of_steps(runtime))

        proxy.seen.clear()
        third = learn(machines, runtime, second, batch)
        assert not read_of_artifacts(proxy)  # all that it needed was on that machine

        shutil.rmtree(machines.other)
        learn(machines, runtime, third, batch)
        assert here(machines.other) == [layout.checkpoint(2), layout.checkpoint(3), batch.path, layout.MODEL]

    rewind(machines.root, Rewind(iteration=0, step="train"))
    with machines.runtime() as runtime:
        machines.other.joinpath(second.path).parent.mkdir(exist_ok=True)
        shutil.copytree(next(machines.root.glob(f"superseded/*/{second.path}")), machines.other / second.path)
        again = learn(machines, runtime, first, batch)  # the same inputs: made anew all the same
        assert again.digest == second.digest
        assert read_manifest(machines.root / again.path) != read_manifest(
            next(machines.root.glob(f"superseded/*/{second.path}"))
        )
        assert finished(place) == here(machines.root)  # and what followed is set aside in the bucket
    rewind(machines.root, Rewind(iteration=0, step="train"))
    with machines.runtime() as runtime:
        other = learn(machines, runtime, first, batch, rate=2.0)
        assert other.digest != second.digest
        assert verify(machines.other / other.path) == verify(machines.root / other.path)

    shutil.rmtree(machines.root / other.path)  # as if the flow was killed while the step was at work
    machines.said.clear()
    with machines.runtime() as runtime:
        assert learn(machines, runtime, first, batch, rate=2.0) == other
    assert not machines.said

    os.environ["AWS_ENDPOINT_URL_S3"] = proxy.url  # the fixture sets it back
    proxy.seen.clear()
    assert backup(machines.root, place, print)
    sent = [line for line in proxy.seen if line.startswith("PUT ") and "/night/" in line]
    assert sent and not [line for line in sent if any(f"/{path}/" in line for path in finished(place))]
    restored = machines.root.with_name("restored") / "night"
    restore(place, "night", restored)
    assert tree(restored) == tree(machines.root)


def learn(machines: Machines, runtime: PoolRuntime, start: Checkpoint, batch: Batch, rate: float = 1.0) -> Checkpoint:
    inputs = LearnInputs(checkpoint=start, batch=batch, rate=rate)
    return machines.run(runtime, LEARN, inputs, layout.checkpoint(start.iteration + 1))


def runs_of_steps(runtime: PoolRuntime) -> list[Any]:
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter.model_validate({"tags": {"all_": [runtime._tag]}})
        return [run.model_dump() for run in client.read_flow_runs(flow_run_filter=wanted)]


@pytest.mark.slow
def test_a_killed_step_is_tried_again(machines: Machines, place: BucketSettings, tmp_path: Path) -> None:
    first = machines.begin()
    batch = make_batch(machines.root)
    inputs, path = LearnInputs(checkpoint=first, batch=batch), layout.checkpoint(1)
    with machines.runtime() as runtime:
        with pytest.raises(StepFailed, match=r"checkpoints/0001: was killed by SIGKILL"):
            machines.run(runtime, LEARN, inputs, path, LEARN_MARK=str(tmp_path / "mark"))
        assert machines.said[-1].startswith("learns from")
        assert not list(Bucket(place).list(place.key("night", "logs/")))
        made = machines.run(runtime, LEARN, inputs, path, LEARN_MARK=str(tmp_path / "mark"))
    assert verify(machines.root / made.path) == verify(machines.other / made.path)
    assert not list(machines.other.rglob("*.partial"))


def make_batch(root: Path) -> Batch:
    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        (workspace.out / "batch.parquet").write_bytes(b"records")
        return {"iteration": 0, "sequences": 1, "tokens": 1, "trained_tokens": 1, "dropped": {}}

    return Step("collate", Inputs, Batch, work).run(Inputs(), root, layout.batch(0))


@pytest.mark.slow
@pytest.mark.serve
def test_a_model_is_served_from_a_machine_that_fetches_what_it_loads(
    machines: Machines, place: BucketSettings, tiny_run: Path
) -> None:
    copied(tiny_run, machines.root, layout.MODEL)
    checkpoints = [copied(tiny_run, machines.root, layout.checkpoint(iteration)) for iteration in (1, 2)]
    with machines.runtime() as runtime:
        service = runtime.serve(tiny_inputs(), machines.said.append)
        endpoint = Endpoint.read(service.endpoint)
        assert endpoint and endpoint.root == machines.other.resolve()
        for wanted in checkpoints:
            runtime.lend(wanted)
            assert load_adapter(endpoint, machines.root, wanted).verdict.answers_as == "checkpoint"
        assert not list(Bucket(place).list(place.key("night", "logs/")))
        service.stop()
        assert not service.alive()


def copied(run: Path, root: Path, path: str) -> Checkpoint:
    """An artifact with the files of a folder of another run."""

    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        shutil.copytree(run / path, workspace.out, dirs_exist_ok=True)
        number = int(path[-1]) if path[-1].isdigit() else 0
        return {"iteration": number, "base_model": "model", "step": number, "updated": True, "metrics": {}}

    return Step("train", Inputs, Checkpoint, work).run(Inputs(), root, path)
