"""One step, or the model server, as a flow of its own: what the `pool` runtime starts on a work pool.

The worker's machine sees the runs folder too, at its own NIGHTSCHOOL_RUNS. What the step is asked for lies there, or in
a bucket where only that is shared: inputs can be larger than Prefect takes as parameters, and the policy's key is none
of Prefect's business. How it ended is told by the state's name and message.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed

from flows.runtimes.base import StepLog
from flows.runtimes.deployment_runs import INVALID, is_final
from flows.runtimes.handover import write_for_us_only
from flows.runtimes.places import place_of, python_of
from flows.runtimes.process import killed_by
from flows.runtimes.service import FOLDER, LocalService
from flows.runtimes.warm import WarmParent, WarmParentDied
from steps.common import layout
from steps.common.errors import InvalidInputs, NightschoolError, StepFailed
from steps.common.runs import RUNS, runs_folder
from steps.common.storage import write_atomically
from steps.remote.settings import BucketSettings
from steps.serve import read_inputs
from steps.serving.settings import ServeInputs

LOOKS = 15.0
"""Seconds between two looks at the flow that a model is served for."""


@flow(name="step", flow_run_name="{step} {path}", persist_result=False)
def run_step(run: str, step: str, path: str, timeout: float, place: str | None = None) -> State[Any]:
    """Makes one artifact of a run. Its inputs were written beside its log by whoever asks for it.

    Args:
        run: The run's name.
        step: The step's, like train.
        path: The artifact's folder in the run's, like checkpoints/0001.
        timeout: Seconds until the step is killed.
        place: Where the step finds what it needs and leaves what it makes, like s3://bucket/prefix, where this machine
            has not got the run's folder.
    """
    try:
        root = runs_folder() / run if place else folder_of(run)
        log = StepLog(root, step, path, get_run_logger().info)
        with by_bucket(place, log, root, step, path) if place else nullcontext():
            attempt(log, root, step, path, timeout)
    except NightschoolError as error:
        return failed(error)
    return Completed(message=f"{path} is finished")


@flow(name="serve", flow_run_name="serve {run}", persist_result=False)
def serve_model(run: str, place: str | None = None) -> State[Any]:
    """Serves the model of a run, for as long as the flow that asked for it goes on. Cancel it to stop the server.

    Args:
        run: The run's name.
        place: Where the server finds what it needs, like s3://bucket/prefix, where this machine has not got the run's
            folder.
    """
    try:
        if place:
            return serve_apart(place, runs_folder() / run)
        root = folder_of(run)
        with serving(root, read_inputs(root / FOLDER / "inputs.json")) as service:
            return watch(service)
    except NightschoolError as error:
        return failed(error)


def serve_apart(place: str, root: Path) -> State[Any]:
    """Serves with what is in a bucket, and goes on fetching what is to be loaded."""
    from flows.runtimes.lending import Borrower

    borrower = Borrower(place, root, get_run_logger().info)
    with serving(root, borrower.asked()) as service:
        borrower.announce()
        return watch(service, borrower.look)


@contextmanager
def serving(root: Path, inputs: ServeInputs) -> Iterator[LocalService]:
    """The server, up; stopped in the end."""
    service = LocalService.start(root, inputs, get_run_logger().info, own_address())
    try:
        yield service
    finally:
        service.stop()


def folder_of(run: str) -> Path:
    """The run's folder on this machine. Raises `InvalidInputs`."""
    root = runs_folder() / run
    if not root.is_dir():
        raise InvalidInputs(f"there is no {root} on {socket.gethostname()}: mount the runs folder and set {RUNS}")
    return root


def failed(error: NightschoolError) -> State[Any]:
    """The state that says whether to try again, and why."""
    return Failed(name=INVALID if isinstance(error, InvalidInputs) else "Failed", message=str(error))


def attempt(log: StepLog, root: Path, step: str, path: str, timeout: float) -> None:
    """Runs the step in its own environment on this machine. Raises `InvalidInputs` and `StepFailed`."""
    argv = [f"steps.{step}", "--root", str(root), "--path", path, "--inputs", str(log.file.with_suffix(".json"))]
    parent = WarmParent(python_of(place_of(step)), [], root / layout.LOGS / "warm" / f"{step}.log")
    with closing(parent):
        try:
            status = parent.run(argv, secrets_of(log.file), timeout, log.write)
        except TimeoutError:
            raise log.failure(path, -signal.SIGKILL, f"was stopped after {timeout:.0f} s, its time limit") from None
        except WarmParentDied as error:
            raise StepFailed(f"{path}: {error}") from None
    if status:
        raise log.failure(path, status, killed_by(-status) if status < 0 else "")


@contextmanager
def by_bucket(place: str, log: StepLog, root: Path, step: str, path: str) -> Iterator[None]:
    """Has here what the step needs; then, where that went well, has what it made in the bucket, and its log anyhow.

    Raises `InvalidInputs`, `StepFailed`, `BucketFault` and what else `prepare` and `deliver` do.
    """
    from steps.remote.bucket import Bucket
    from steps.remote.transfer import LOG, Request, deliver, letter, prepare
    from steps.remote.upload import overwrite

    bucket = Bucket(BucketSettings.at(place))
    before = log.file.stat().st_size if log.file.exists() else 0
    request = Request.read(bucket, root.name, step, path)
    try:
        prepare(bucket, root, request, log.write)
        write_atomically(log.file.with_suffix(".json"), request.inputs.encode())
        write_for_us_only(log.file.with_suffix(".env"), json.dumps(request.env))
        yield
        deliver(bucket, root, request)
    finally:
        log.file.with_suffix(".env").unlink(missing_ok=True)
        if log.file.exists():
            said = log.file.read_bytes()[before:]
            overwrite(bucket, bucket.settings.key(root.name, letter(step, path, LOG)), said)


def secrets_of(log: Path) -> Mapping[str, str]:
    """Environment variables that lie beside the log while the step is wanted."""
    try:
        env: Mapping[str, str] = json.loads(log.with_suffix(".env").read_text())
    except FileNotFoundError:
        raise StepFailed(f"{log.with_suffix('.env')} is gone: whoever asked for this step has given it up") from None
    return env


def own_address() -> str:
    """Where others find this machine: NIGHTSCHOOL_SERVE_ADDRESS, else its address on the way to Prefect's API.

    On a machine that has the API itself that is loopback, which nobody else reaches.
    """
    if given := os.environ.get("NIGHTSCHOOL_SERVE_ADDRESS"):
        return given
    api = urlsplit(get_current_settings().api.url or "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((api.hostname or "127.0.0.1", api.port or 443))
        return str(unsent.getsockname()[0])


def watch(service: LocalService, chore: Callable[[], None] = lambda: None) -> State[Any]:
    """Returns when the server is of no more use; does the chore now and then."""
    asked_by, look = flow_run.get_parent_flow_run_id(), time.monotonic() + LOOKS
    while service.alive():
        time.sleep(1.0)
        chore()
        if asked_by and time.monotonic() > look:
            look = time.monotonic() + LOOKS
            if has_ended(asked_by):
                return Completed(message="the flow that asked for it has ended")
    return Failed(message="the model server ended by itself")


def has_ended(id: str) -> bool:
    """Is a flow run in a final state?"""
    with get_client(sync_client=True) as client:
        return is_final(client, UUID(id))
