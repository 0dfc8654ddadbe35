"""`nightschool up` and `down`: all that a machine needs to train on demand and by night, started once and left running.

Prefect's server, a work pool of processes, a worker, the deployments of `prefect.yaml` in the working directory, and an
automation that ends flow runs which were killed together with their worker. Again, it changes nothing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.command import client_settings
from flows.daemons import Daemon, spawn, started
from flows.runtimes.containers import answers, sweep_runs
from flows.server import ensure_server, home, stop_server, wait_until_ready
from steps.common.errors import InvalidInputs, NightschoolError
from steps.common.runs import RUNS, runs_folder
from steps.common.storage import write_atomically

DEPLOYMENTS = Path("prefect.yaml")
POOL = "nightschool"
RECORD, LOG = "worker.json", "worker.log"
DEPLOYING = 300.0
"""Seconds that `prefect deploy` may take."""
SETTINGS = {
    "PREFECT_WORKER_QUERY_SECONDS": "5",
    "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",  # flow runs use the worker's own environment
}


class WorkerRecord(Daemon):
    """`worker.json`."""

    api: str
    """Of the server that it works for."""


def bring_up() -> Iterator[str]:
    """Starts what is not up, deploys, and gives the lines that say what there is.

    Raises `InvalidInputs` where there is no `prefect.yaml`, `NightschoolError` where it can't be deployed.
    """
    if not DEPLOYMENTS.is_file():
        raise InvalidInputs(f"there is no {DEPLOYMENTS} in {Path.cwd()}: run `nightschool up` in the project's folder")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker that inherits it ignored can't be stopped
    server = None if os.environ.get("PREFECT_API_URL") else ensure_server(home())
    if server:
        wait_until_ready(home(), server)
    os.environ.update(client_settings(server))
    from flows.provision import deployed_in, ensure_automation, ensure_pool

    ensure_pool(POOL)
    ensure_automation()
    deploy()
    ensure_worker(home(), os.environ["PREFECT_API_URL"])
    yield f"UI           {os.environ['PREFECT_API_URL'].removesuffix('/api')}"
    yield f"deployments  {', '.join(deployed_in(POOL))}"
    yield f"runs         {runs_folder()}"
    yield f"to train     export PREFECT_API_URL={os.environ['PREFECT_API_URL']}"
    yield "             prefect deployment run train/on-demand --param config=configs/demo.toml"


def take_down() -> Iterator[str]:
    """Stops what `bring_up` and `nightschool train` started, removes containers that runs have left, and says so."""
    worker = WorkerRecord.read(home() / RECORD)
    if worker:
        worker.stop()
        yield "stopped the worker"
    if stop_server(home()):
        yield "stopped the server"
    elif not worker:
        yield "there was none"
    if answers() and (removed := sweep_runs(runs_folder())):
        yield f"removed {removed} containers"


def ensure_worker(home: Path, api: str) -> WorkerRecord:
    """Our worker for the server at `api`; one for another server is stopped."""
    record = WorkerRecord.read(home / RECORD)
    if record and record.api == api:
        return record
    if record:
        record.stop()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    environment = os.environ | SETTINGS | {RUNS: str(runs_folder())}
    pid = spawn(command, environment, home / LOG)
    record = WorkerRecord(pid=pid, started=started(pid) or "", api=api)
    write_atomically(home / RECORD, record.model_dump_json().encode())
    return record


def deploy() -> None:
    """Makes the deployments, or brings them up to date."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOYING)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NightschoolError(f"can't deploy {DEPLOYMENTS.absolute()}: {(said or ['it said nothing'])[-1].strip()}")
