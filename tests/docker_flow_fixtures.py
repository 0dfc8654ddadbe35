"""A whole run in containers, for tests that kill and cancel it: real vLLM, real training, both work pools of `up`."""

import json
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from docker_fixtures import ours, with_modules
from machine_fixtures import DEPLOYMENTS, Machine, alive

from flows.config import RunConfig
from flows.plan import Plan
from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.status import damages, status_of

DOCKED = Path(__file__).parent / "docked"
FLOW_RUN = "io.prefect.flow-run-id"
NOTES = ".notes"
GROUP_SIZE = 2
PATIENCE = 400.0
"""Seconds for what takes 20 on an idle machine."""


def settings(name: str, **more: object) -> dict[str, Any]:
    """A run of one iteration: two shards of two groups, and two evaluations."""
    images = {place: {"image": image(place)} for place in ("rollout", "train")}
    return {
        "name": name,
        "iterations": 1,
        "environment": {"name": "docked:Docked", "options": {"test_tasks": 2}},
        "model": {"pretrain": {"steps": 3, "hidden_size": 64, "layers": 1, "mlp_size": 64}},
        "lora": {"rank": 8},
        "sampling": {"max_tokens": 4},
        "rollout": {"groups": 4, "group_size": GROUP_SIZE, "groups_per_shard": 2},
        "evaluate": {"tasks": 2, "every": 1},
        "serve": {"max_model_len": 512},
        "runtime": {"type": "docker", **images},
        **more,
    }


def image(place: str) -> str:
    """Nightschool's own, with `docked` in it."""
    return f"nightschool-test/docked-{place}"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, engine: Any) -> Iterator[Machine]:
    """A machine that is up, whose flows and containers know `docked`; in the end it is down, and nothing is left."""
    for place, modules in {"rollout": ["docked"], "flow": ["docked"], "train": ["docked", "sitecustomize"]}.items():
        base, files = f"nightschool/{place}:{version('nightschool')}", [f"docked/{module}" for module in modules]
        with_modules(engine, base, image(place), *files, path="/opt/nightschool")
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.environment["PYTHONPATH"] = os.pathsep.join([str(DOCKED), os.environ.get("PYTHONPATH", "")])
    (machine.project / DEPLOYMENTS.name).write_text(DEPLOYMENTS.read_text())
    machine.up()
    yield machine
    machine.run("nightschool", "down")
    assert not alive(machine.project)


class Docked:
    """A run on that machine, and its flow run."""

    def __init__(self, machine: Machine, engine: Any, name: str, **more: object) -> None:
        self.machine, self.engine, self.name = machine, engine, name
        self.settings = settings(name, **more)
        self.root = machine.runs / name
        self.held = self.root / "held"
        self.held.mkdir(parents=True)
        self.flow_run = ""
        self.finished: dict[str, bytes] = {}

    # Prefect

    def ask(self, deployment: str) -> None:
        """For a flow run; one of the docker pool is in the image that knows `docked`."""
        given = [f"--param=config={json.dumps(self.settings)}", "--param=overrides=[]"]
        given += [f"--job-variable=image={image('flow')}"] if deployment == "train/containers" else []
        said = self.machine.run("prefect", "deployment", "run", deployment, *given)
        self.flow_run = next(line.split()[-1] for line in said.splitlines() if "UUID" in line)

    def retry(self) -> None:
        """As the UI's button does."""
        self._set_state("SCHEDULED", "AwaitingRetry")

    def cancel(self) -> None:
        """As the UI's button does."""
        self._set_state("CANCELLING", "Cancelling")

    def wait_for_state(self, state: str, timeout: float = PATIENCE) -> float:
        """Seconds until the flow run has it."""
        return self.wait_for(lambda: self.machine.state(self.flow_run) == state, f"state {state}", timeout)

    def crashes(self) -> float:
        """Seconds until the flow run is Crashed, and its worker has had its last word on that."""
        began = time.monotonic()
        self.machine.crashes(self.flow_run, PATIENCE)
        return time.monotonic() - began

    def taken_up(self) -> int:
        """How often training went on in a container of an earlier attempt."""
        lines = self._post("logs/filter", {"logs": {"flow_run_id": {"any_": [self.flow_run]}}})
        return sum("its container goes on since" in line["message"] for line in lines)

    def _set_state(self, type: str, name: str) -> None:
        said = self._post(f"flow_runs/{self.flow_run}/set_state", {"state": {"type": type, "name": name}})
        assert said["status"] == "ACCEPT", said

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.machine.api}/{path}", json.dumps(body).encode(), header)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    # What is held

    def hold_tasks(self, *tasks: str) -> None:
        (self.held / "tasks").write_text(" ".join(tasks))

    def hold_training(self) -> None:
        (self.held / "train").touch()

    def release_training(self) -> None:
        (self.held / "train").unlink()

    def wait_until_held(self, *names: str) -> float:
        """Seconds until they wait, and not only did before something was killed."""
        for note in self.notes("*.waiting"):
            note.unlink()
        return self.wait_for(lambda: set(names) <= {note.stem for note in self.notes("*.waiting")}, f"{names} waiting")

    def notes(self, pattern: str) -> list[Path]:
        return [note for folder in self.root.rglob(NOTES) for note in folder.glob(pattern)]

    def played(self) -> Counter[str]:
        """How often an attempt at each task was begun."""
        return Counter(" ".join(note.read_text() for note in self.notes("played")).split())

    def shards(self) -> list[list[str]]:
        """Ids of the tasks that the run plays, by the plan that it follows."""
        config = RunConfig.model_validate(self.settings | {"environment": {"name": "tic_tac_toe"}})
        nothing = Checkpoint(path="", digest="", iteration=0, base_model="", step=0, updated=False, metrics={})
        return [[task.id for task in shard.tasks] for shard in Plan(config).shards(nothing)]

    # Containers and processes

    def containers(self, step: str = "") -> list[Any]:
        """Those of the run that are up, whose names end with a step's path or `serve`."""
        label = {"label": f"nightschool.run={self.root}"}
        return [
            container
            for container in self.engine.containers.list(filters=label, ignore_removed=True)
            if step in container.name
        ]

    def kill_containers(self, step: str) -> None:
        containers = self.containers(step)
        assert containers
        for container in containers:
            container.kill()

    def flow_processes(self) -> list[int]:
        """Of the process pool's flow run."""
        return [pid for pid in alive(self.machine.project) if self.is_flow(pid)]

    def is_flow(self, pid: int) -> bool:
        """Does the process run the flow run, or is it one of its steps?"""
        return f"PREFECT__FLOW_RUN_ID={self.flow_run}".encode() in read(pid, "environ")

    def flow_container(self) -> Any:
        """Of the docker pool: it is labelled with the folder of runs, not with one of them."""
        label = {"label": f"nightschool.run={self.machine.runs}"}
        (container,) = self.engine.containers.list(filters=label, ignore_removed=True)
        return container

    def at_work(self) -> list[Any]:
        """Processes and containers of the flow run."""
        named = [c for c in self.engine.containers.list(ignore_removed=True) if c.labels.get(FLOW_RUN) == self.flow_run]
        return [*self.containers(), *named, *self.flow_processes()]

    def left(self) -> list[str]:
        """Containers and networks of the run, also those that have ended."""
        return ours(self.engine, self.root)

    # Files

    def stored_groups(self) -> dict[Path, int]:
        """The groups of unfinished shards, and when each was written."""
        files = (self.root / layout.shards(0)).glob(".*.groups/*.parquet")
        return {file: file.stat().st_mtime_ns for file in files}

    def check_manifests(self) -> None:
        """None of those that were there has changed since the last time."""
        now = {
            manifest.parent.relative_to(self.root).as_posix(): manifest.read_bytes()
            for manifest in self.root.rglob(layout.MANIFEST)
            if not manifest.parent.name.startswith(".")
        }
        assert {path: now.get(path) for path in self.finished} == self.finished
        self.finished = now

    def check_the_end(self) -> None:
        """Everything was done once and whole, and nothing else is left."""
        self.check_manifests()
        first, played = [shard[0] for shard in self.shards()], self.played()
        assert {task: played[task] for task in first} == dict.fromkeys(first, GROUP_SIZE)
        assert not [path for path in self.root.rglob(".*") if path.name not in (layout.LOCK, NOTES)]
        assert not [damage for _, damage in damages(self.root) if damage]
        assert status_of(self.root).state == "finished"
        assert self.left() == []

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> float:
        """Seconds until it is true."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + timeout, f"no {what}:\n{self.machine.logs()}"
            time.sleep(0.1)
        return time.monotonic() - began


def read(pid: int, what: str) -> bytes:
    """A file of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def kill(*pids: int | None) -> None:
    """At least one."""
    assert pids
    for pid in pids:
        assert pid
        os.kill(pid, signal.SIGKILL)


def timed(what: str, seconds: float) -> None:
    """For who runs the tests with `-s`."""
    print(f"{what} after {seconds:.1f} s")
