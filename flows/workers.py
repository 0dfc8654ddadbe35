"""The two work pools of a machine, and the worker that it runs for each."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from flows.daemons import Daemon, spawn, started
from flows.runtimes.containers import RUN, connect
from steps.common.runs import RUNS, runs_folder
from steps.common.storage import write_atomically

SETTINGS = {
    "PREFECT_WORKER_QUERY_SECONDS": "5",
    "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",  # flow runs use the worker's own environment
}
STOPPING = 10
"""Seconds that a flow in a container may take to end what it has started."""


class Pool(NamedTuple):
    """A work pool."""

    name: str
    type: str
    """As Prefect calls it: what its flow runs are."""


PROCESSES = Pool("nightschool", "process")
CONTAINERS = Pool("nightschool-docker", "docker")
POOLS = (PROCESSES, CONTAINERS)


class WorkerRecord(Daemon):
    """`worker-<type>.json`."""

    api: str
    """Of the server that it works for."""


def ensure_worker(pool: Pool, home: Path, api: str) -> WorkerRecord:
    """Our worker of a pool for the server at `api`; one for another server is stopped."""
    file = record_of(pool, home)
    record = WorkerRecord.read(file)
    if record and record.api == api:
        return record
    if record:
        record.stop()
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool.name, "--type", pool.type]
    pid = spawn(command, os.environ | SETTINGS | {RUNS: str(runs_folder())}, file.with_suffix(".log"))
    record = WorkerRecord(pid=pid, started=started(pid) or "", api=api)
    write_atomically(file, record.model_dump_json().encode())
    return record


def stop_workers(home: Path) -> Iterator[str]:
    """Stops those that run, and gives their pools' names."""
    for pool in POOLS:
        if record := WorkerRecord.read(record_of(pool, home)):
            record.stop()
            yield pool.name


def flows_at_work(runs: Path) -> Iterator[Daemon]:
    """Flow runs in processes, for the folder `runs`: each leads a group, and outlives a worker that is killed.

    The worker gave them the folder and the flow run in their environment, and a program of Prefect's.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            given = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
            leads = os.getpgid(int(process.name)) == int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue
        is_flow = any(variable.startswith(b"PREFECT__FLOW_RUN_ID=") for variable in given)
        if leads and is_flow and f"{RUNS}={runs}".encode() in given and b"\0-m\0prefect." in command:
            yield Daemon(pid=int(process.name), started=started(int(process.name)) or "")


def end_flows(runs: Path) -> int:
    """Ends those while the server that they report to is still there, and counts them."""
    found = list(flows_at_work(runs))
    for flow in found:
        flow.stop()
    return len(found)


def record_of(pool: Pool, home: Path) -> Path:
    """The file that tells of its worker."""
    return home / f"worker-{pool.type}.json"


def stop_flows(runs: Path) -> None:
    """Asks flows in containers to end, which the worker that started them does not. They say so to Prefect."""
    with closing(connect()) as engine:
        for container in engine.containers.list(filters={"label": f"{RUN}={runs.resolve()}"}, ignore_removed=True):
            container.stop(timeout=STOPPING)


def has_image(name: str) -> bool:
    """Is it on this machine?"""
    with closing(connect()) as engine:
        return bool(engine.images.list(name=name))
