"""`nightschool up` and `down`: all that a machine needs to train on demand and by night, started once and left running.

Prefect's server, work pools of processes and of containers with a worker each, the deployments of `prefect.yaml` in the
working directory, and an automation that ends flow runs which were killed together with their worker. Again, it changes
nothing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.command import client_settings
from flows.daemons import locked
from flows.runtimes.containers import answers, sweep_runs
from flows.server import ensure_server, home, stop_server, wait_until_ready
from flows.workers import CONTAINERS, POOLS, PROCESSES, end_flows, ensure_worker, has_image, stop_flows, stop_workers
from steps.common.errors import InvalidInputs, NightschoolError
from steps.common.runs import runs_folder

DEPLOYMENTS = Path("prefect.yaml")
LOCK = "up.lock"
DEPLOYING = 300.0
"""Seconds that `prefect deploy` may take."""


def bring_up() -> Iterator[str]:
    """Starts what is not up, deploys, and gives the lines that say what there is. A second one meanwhile waits.

    Raises `InvalidInputs` where there is no `prefect.yaml`, `NightschoolError` where it can't be deployed.
    """
    if not DEPLOYMENTS.is_file():
        raise InvalidInputs(f"there is no {DEPLOYMENTS} in {Path.cwd()}: run `nightschool up` in the project's folder")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker that inherits it ignored can't be stopped
    with locked(home() / LOCK):
        server = None if os.environ.get("PREFECT_API_URL") else ensure_server(home())
        if server:
            wait_until_ready(home(), server)
        os.environ.update(client_settings(server))
        yield from provide()
    yield f"UI           {os.environ['PREFECT_API_URL'].removesuffix('/api')}"
    yield f"runs         {runs_folder()}"
    yield f"to train     export PREFECT_API_URL={os.environ['PREFECT_API_URL']}"
    yield "             prefect deployment run train/on-demand --param config=configs/demo.toml"


def provide() -> Iterator[str]:
    """What the server is to have, and a worker for each pool."""
    from prefect.workers.process import ProcessWorker

    from flows.job_template import IMAGE, containers_template
    from flows.provision import deployed_in, ensure_automation, ensure_pool, ensure_template

    ensure_pool(PROCESSES.name, PROCESSES.type, ProcessWorker.get_default_base_job_template())
    template = containers_template(runs_folder().resolve(), Path.cwd())
    ensure_pool(CONTAINERS.name, CONTAINERS.type, template)
    ensure_template(CONTAINERS.name, template)
    ensure_automation()
    deploy()
    engine = answers()
    for pool in POOLS if engine else (PROCESSES,):
        ensure_worker(pool, home(), os.environ["PREFECT_API_URL"])
    for pool in POOLS:
        yield f"{pool.type:<12} {', '.join(sorted(deployed_in(pool.name)))}"
    if not engine:
        yield "             no Docker engine answers: flow runs of the last line wait for one, and for `up`"
    elif not has_image(IMAGE):
        yield f"             there is no image {IMAGE}, which flow runs of the last line need: run `make images`"


def take_down() -> Iterator[str]:
    """Stops what `bring_up` and `nightschool train` started, removes containers that runs have left, and says so."""
    with locked(home() / LOCK):
        stopped = list(stop_workers(home()))
        flows, removed = end_flows(runs_folder()), 0
        if answers():
            stop_flows(runs_folder())
            removed = sweep_runs(runs_folder())
        if stopped:
            yield f"stopped the workers of {' and '.join(stopped)}"
        if flows:
            yield f"stopped {flows} flow runs"
        if stop_server(home()):
            yield "stopped the server"
        elif not (stopped or flows):
            yield "there was none"
        if removed:
            yield f"removed {removed} containers"


def deploy() -> None:
    """Makes the deployments, or brings them up to date."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOYING)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NightschoolError(f"can't deploy {DEPLOYMENTS.absolute()}: {(said or ['it said nothing'])[-1].strip()}")
