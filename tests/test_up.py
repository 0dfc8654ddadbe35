"""`nightschool up` and `down`: what Prefect is given, that it works for deployments, and that nothing stays."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from flow_fixtures import Steps, config_of
from prefect.utilities.callables import parameter_schema

from flows.nights import nightly
from flows.server import ServerRecord
from flows.train import train
from flows.up import WorkerRecord
from steps.common import layout
from steps.common.artifacts import read_manifest
from steps.common.nights import Night
from steps.common.runs import RUNS
from steps.common.status import status_of

COMMANDS = Path(sys.executable).parent
DEPLOYMENTS = Path(__file__).parent.parent / "prefect.yaml"
FAR_EAST = "Pacific/Kiritimati"  # 14 hours ahead
NIGHT = ["--param", "config=night.toml"]
RECORDS = {"server.json": ServerRecord, "worker.json": WorkerRecord}


@pytest.mark.parametrize("flow", [train, nightly])
def test_every_parameter_is_described(flow: Any) -> None:
    schema = parameter_schema(flow)
    undescribed = [name for name, parameter in schema.properties.items() if not parameter.get("description")]
    assert undescribed == []
    assert list(schema.required) == ["config"]
    nested = {name: model["properties"] for name, model in schema.definitions.items()}
    assert nested["Rewind"]["shard"]["description"] == "Only this shard of the rollouts."
    assert nested["RunConfig"]["iterations"]["description"]


class Machine:
    """A folder with a project, and a server and a worker of its own."""

    def __init__(self, project: Path) -> None:
        self.project, self.runs = project, project / "runs"
        self.home = self.runs / ".prefect"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self.environment |= {RUNS: str(self.runs), "PREFECT_HOME": str(project / "client")}

    def run(self, command: str, *arguments: str) -> str:
        """What a command says; it succeeds."""
        done = subprocess.run(
            [COMMANDS / command, *arguments],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def logs(self) -> str:
        return "".join(file.read_text()[-4000:] for file in self.home.glob("*.log"))

    def listed(self) -> list[Any]:
        """What the server holds, without what changes when nothing does."""
        keys = ("id", "name", "parameters", "tags", "entrypoint", "pull_steps", "trigger")
        found = []
        for what in ("deployments", "work_pools", "automations"):
            found.append([{key: row.get(key) for key in keys} for row in self.rows(what)])
        return found

    def rows(self, what: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/{what}/filter", b"{}", {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            rows: list[dict[str, Any]] = json.load(answer)
        return rows

    def flow_run(self) -> dict[str, Any]:
        """The one that is not just scheduled."""
        return next(row for row in self.rows("flow_runs") if row["state_type"] != "SCHEDULED" or row["run_count"])

    def processes(self) -> dict[str, int | None]:
        found = {name: kind.read(self.home / name) for name, kind in RECORDS.items()}
        return {name: record and record.pid for name, record in found.items()}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    project = tmp_path / "project"
    project.mkdir()
    (project / DEPLOYMENTS.name).write_text(DEPLOYMENTS.read_text().replace("UTC", FAR_EAST))
    machine = Machine(project)
    yield machine
    machine.environment.pop("PREFECT_API_URL", None)
    machine.run("nightschool", "down")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_machine_trains_on_demand_and_by_night(
    steps: Steps, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS, str(machine.runs))
    train(config_of(machine.project))  # what takes models is made here, by tiny steps
    root = machine.runs / "night"
    grouped = read_manifest(root / "iterations/0001/groups")

    said = machine.run("nightschool", "up")
    assert "nightly/nightly (0 2 * * * Pacific/Kiritimati), train/on-demand" in said
    api = api_in(said)
    processes = machine.processes()
    assert all(processes.values())
    machine.environment["PREFECT_API_URL"] = api
    before = machine.listed()
    assert [len(rows) for rows in before] == [2, 1, 1]

    del machine.environment["PREFECT_API_URL"]
    machine.run("nightschool", "up")
    machine.environment["PREFECT_API_URL"] = api
    assert machine.processes() == processes
    assert machine.listed() == before

    watched = ["--watch", "--watch-timeout", "150", *NIGHT]
    again = json.dumps({"iteration": 1, "step": "group"})
    machine.run("prefect", "deployment", "run", "train/on-demand", *watched, "--param", f"rewind={again}")
    anew = read_manifest(root / "iterations/0001/groups")
    assert anew and grouped and anew.started > grouped.started

    today = datetime.now(ZoneInfo(FAR_EAST)).date()
    (root / "nights").mkdir()
    (root / layout.night(today)).write_text(Night(date=today, first=1, last=2).model_dump_json())
    machine.run("prefect", "deployment", "run", "nightly/nightly", *watched)  # finds its target reached

    del machine.environment["PREFECT_API_URL"]
    assert machine.run("nightschool", "down") == "stopped the worker\nstopped the server\n"
    assert machine.processes() == {"server.json": None, "worker.json": None}
    assert not alive(machine.project)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_flow_run_killed_with_its_worker_is_retried(
    steps: Steps, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS, str(machine.runs))
    train(config_of(machine.project))
    held = machine.project / "held"
    held.mkdir()
    (held / "group").touch()  # the step waits before its artifact counts
    machine.environment |= {"HELD": str(held), "PYTHONPATH": str(Path(__file__).parent / "held")}

    api = api_in(machine.run("nightschool", "up"))
    machine.environment["PREFECT_API_URL"] = api
    again = json.dumps({"iteration": 1, "step": "group"})
    machine.run("prefect", "deployment", "run", "train/on-demand", "--param", f"rewind={again}", *NIGHT)
    wait_for((held / "group.waiting").exists, 120)
    for pid in alive(machine.project):
        if "uvicorn" not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: machine.flow_run()["state_type"] == "CRASHED", 120)
    print(f"called crashed {time.monotonic() - killed:.0f} s after the kill")

    (held / "group").unlink()
    del machine.environment["PREFECT_API_URL"]
    machine.run("nightschool", "up")
    machine.environment["PREFECT_API_URL"] = api
    machine.run("prefect", "flow-run", "retry", machine.flow_run()["id"])
    wait_for(lambda: machine.flow_run()["state_type"] == "COMPLETED", 120)
    root = machine.runs / "night"
    assert status_of(root).state == "finished"
    assert not list(root.rglob("*.partial"))
    assert len(list(root.glob("superseded/*"))) == 1  # the retry did not go back again


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


def api_in(said: str) -> str:
    return next(line.partition("=")[2] for line in said.splitlines() if "export PREFECT_API_URL" in line)


def alive(folder: Path) -> list[int]:
    """Processes that were started with runs in `folder`, but for this one."""
    mark = f"{RUNS}={folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if pid != os.getpid()]
