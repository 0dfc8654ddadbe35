"""A machine of its own for a test: a folder with a project, in which `nightschool up` starts all that it starts."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.daemons import Daemon
from flows.runtimes.containers import answers
from flows.server import ServerRecord
from flows.workers import CONTAINERS, POOLS, WorkerRecord, record_of
from steps.common.runs import RUNS

COMMANDS = Path(sys.executable).parent
DEPLOYMENTS = Path(__file__).parent.parent / "prefect.yaml"
ADVICE = re.compile(r"prefect\.flow_runs\.worker - (Check whether|Increase the memory)")
FAR_EAST = "Pacific/Kiritimati"  # 14 hours ahead


class Machine:
    """A folder with a project, and a server and workers of its own."""

    def __init__(self, project: Path) -> None:
        self.project, self.runs = project, project / "runs"
        self.home = self.runs / ".prefect"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        self.environment |= {RUNS: str(self.runs), "PREFECT_HOME": str(project / "client")}
        self.api = ""

    def start(self, command: str, *arguments: str) -> "subprocess.Popen[str]":
        """A command at work; it knows the server once that was brought up."""
        known = {"PREFECT_API_URL": self.api} if self.api and command == "prefect" else {}
        return subprocess.Popen(
            [COMMANDS / command, *arguments],
            cwd=self.project,
            env=self.environment | known,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process: "subprocess.Popen[str]") -> str:
        """What a command says; it succeeds."""
        said, _ = process.communicate(timeout=250)
        assert process.returncode == 0, said + self.logs()
        return said

    def run(self, command: str, *arguments: str) -> str:
        """Both."""
        return self.end(self.start(command, *arguments))

    def up(self) -> str:
        """Everything is up."""
        said = self.run("nightschool", "up")
        self.api = api_in(said)
        return said

    def asked(self, deployment: str, **parameters: object) -> str:
        """A flow run of a deployment, which a worker will start; returns its id."""
        given = [f"--param={name}={json.dumps(value)}" for name, value in parameters.items()]
        said = self.run("prefect", "deployment", "run", deployment, *given)
        return next(line.split()[-1] for line in said.splitlines() if "UUID" in line)

    def state(self, flow_run: str) -> str:
        """Of a flow run, like COMPLETED."""
        with urllib.request.urlopen(f"{self.api}/flow_runs/{flow_run}", timeout=30) as answer:
            return str(json.load(answer)["state_type"])

    def ends(self, state: str, *flow_runs: str, within: float = 600) -> None:
        """Waits until flow runs have come to this state."""
        end = time.monotonic() + within
        while (states := {self.state(id) for id in flow_runs}) != {state}:
            assert time.monotonic() < end, f"{states}\n{self.logs()}"
            time.sleep(0.5)

    def crashes(self, flow_run: str, within: float = 120) -> None:
        """Waits until a flow run is Crashed, and its worker's last word on that: its advice.

        The worker may report the crash a second time, after seconds; what was retried in between, that ends.
        """
        self.ends("CRASHED", flow_run, within=within)
        wait_for(lambda: ADVICE.search(self.logs()), within)

    def logs(self) -> str:
        return "".join(file.read_text()[-6000:] for file in self.home.glob("*.log"))

    def listed(self) -> list[Any]:
        """What the server holds, without what changes when nothing does."""
        keys = ["id", "name", "description", "parameters", "tags", "entrypoint", "pull_steps", "job_variables"]
        keys += ["base_job_template", "trigger"]
        found = []
        for what in ("deployments", "work_pools", "automations"):
            found.append([{key: row.get(key) for key in keys} for row in self.rows(what)])
        return found

    def rows(self, what: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(f"{self.api}/{what}/filter", b"{}", {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            rows: list[dict[str, Any]] = json.load(answer)
        return rows

    def processes(self) -> dict[str, int | None]:
        """The server and the workers that this machine can have."""
        pools = [pool for pool in POOLS if pool is not CONTAINERS or answers()]
        workers = {pool.name: WorkerRecord.read(record_of(pool, self.home)) for pool in pools}
        found: dict[str, Daemon | None] = {"server": ServerRecord.read(self.home / "server.json"), **workers}
        return {name: record.pid if record else None for name, record in found.items()}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """With this project's deployments, and nights that are the far east's."""
    project = tmp_path / "project"
    project.mkdir()
    (project / DEPLOYMENTS.name).write_text(DEPLOYMENTS.read_text().replace("UTC", FAR_EAST))
    machine = Machine(project)
    yield machine
    machine.run("nightschool", "down")


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    """Returns once it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


def api_in(said: str) -> str:
    """The API's address, as `up` prints it."""
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
