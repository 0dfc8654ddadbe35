"""Each step as a deployment run on Prefect's work pools: processes, containers, Kubernetes, ECS, wherever workers are.

Every machine sees the runs folder, or the same bucket; a run of a deployment (`flows.step`) is told the run's name and
looks for the rest there. A run outlives a flow that is killed. The next flow cancels it, unless it trains: that is
taken up again.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from flows.runtimes.base import Runtime, Say, Service
from flows.runtimes.deployment_runs import INVALID, cancel, failure, look_at, unfinished
from flows.runtimes.handover import DiskHandover, Handover
from flows.runtimes.places import place_of
from flows.runtimes.pool_settings import PoolSettings
from flows.runtimes.service import FOLDER
from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs, ServerFault, StepFailed
from steps.common.step import ArtifactT, Inputs, InputsT, Step
from steps.common.storage import write_atomically
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs

if TYPE_CHECKING:
    from flows.runtimes.by_bucket import Depot

LATE = 60.0
"""Seconds beyond its time limit after which a step is cancelled from here: its own machine no longer does."""


class PoolRuntime(Runtime):
    """Starts runs of deployments, and watches them."""

    def __init__(self, root: Path, settings: PoolSettings) -> None:
        super().__init__(root)
        self._settings = settings
        self._tag = f"nightschool:{root.resolve()}"
        self._lock = Lock()
        self._closed = False
        self._active: set[UUID] = set()
        left = unfinished(self._tag)
        self._left = {run.parameters["path"]: run for run in left if run.parameters.get("step") == "train"}
        self.at_work = frozenset(self._left)
        cancel(*(run.id for run in left if run not in self._left.values()))
        self._depot = None if settings.shared_disk else depot_of(root, self.at_work)
        self._service: PoolService | None = None

    def run(
        self,
        step: Step[InputsT, ArtifactT],
        inputs: InputsT,
        path: str,
        *,
        env: Mapping[str, str],
        timeout: float,
        say: Say,
    ) -> ArtifactT:
        handover = self._handover(step.name, inputs, path, say)
        handover.collect()
        if artifact := step.finished(inputs, self.root, path):
            return artifact
        try:
            state = self._attempt(step.name, inputs, path, env, timeout, say, handover)
        finally:
            handover.clear()
        if not state.is_completed():
            raise failure(state, path, handover.log)
        handover.collect()
        if artifact := step.finished(inputs, self.root, path):
            return artifact
        raise StepFailed(f"{path}: the step ended well and left no artifact {handover.missing}")

    def _handover(self, step: str, inputs: Inputs, path: str, say: Say) -> Handover:
        if self._depot:
            return self._depot.handover(step, inputs, path, say)
        return DiskHandover(self.root, step, inputs, path, say)

    def _attempt(
        self,
        step: str,
        inputs: Inputs,
        path: str,
        env: Mapping[str, str],
        timeout: float,
        say: Say,
        handover: Handover,
    ) -> State[Any]:
        id = self._adopted(inputs, path, say)
        if id is None:
            handover.offer(env)
            deployment = self._settings.train if place_of(step) == "train" else self._settings.flow
            parameters = {"run": self.root.name, "step": step, "path": path, "timeout": timeout, **handover.parameters}
            id = self._start(deployment, parameters, inputs.fingerprint())
        try:
            return self._ended(id, path, timeout, handover)
        except BaseException:
            cancel(id)
            raise
        finally:
            self._forget(id)

    def _adopted(self, inputs: Inputs, path: str, say: Say) -> UUID | None:
        """The run of an earlier flow that makes this very artifact; one that makes another there is cancelled."""
        left = self._left.pop(path, None)
        if left is None:
            return None
        if inputs.fingerprint() not in left.tags:
            cancel(left.id)
            return None
        say(f"{path}: its run {left.name} goes on")
        self._active.add(left.id)
        return left.id

    def _start(self, deployment: str, parameters: dict[str, Any], *tags: str) -> UUID:
        with self._lock:
            self._check_open()
            try:
                started = run_deployment(deployment, parameters=parameters, timeout=0, tags=[self._tag, *tags])
            except ObjectNotFound:
                raise InvalidInputs(f"Prefect has no deployment {deployment}: deploy it, or change [runtime]") from None
            run = cast(FlowRun, started)  # a coroutine in an event loop only, and this is a thread without one
            self._active.add(run.id)
        return run.id

    def _ended(self, id: UUID, path: str, timeout: float, handover: Handover) -> State[Any]:
        """Waits for the run's end. Raises `StepFailed` where that takes too long."""
        asked = time.monotonic()
        while True:
            run = look_at(id)
            handover.relay()
            if run.state and run.state.is_final():
                return run.state
            if run.start_time is None and time.monotonic() - asked > self._settings.start_timeout:
                raise StepFailed(f"{path}: no worker took it in {self._settings.start_timeout:.0f} s: does one run?")
            if run.estimated_run_time.total_seconds() > timeout + LATE:
                raise StepFailed(f"{path}: was stopped after {timeout:.0f} s, its time limit (log {handover.log})")
            time.sleep(self._settings.poll)

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        folder, parameters = self.root / FOLDER, {"run": self.root.name}
        (folder / "endpoint.json").unlink(missing_ok=True)
        if self._depot:
            self._depot.lender.ask(inputs)
            parameters["place"] = self._depot.place
        else:
            write_atomically(folder / "inputs.json", inputs.model_dump_json(indent=1).encode())
        service = PoolService(self._start(self._settings.serve, parameters), folder, self._forget)
        say("the model server is asked for")
        try:
            self._wait_until_ready(service, inputs.settings.startup_timeout)
        except BaseException:
            service.stop()
            raise
        self._service = service
        return service

    def lend(self, checkpoint: Checkpoint) -> None:
        if self._depot and self._service:
            self._depot.lender.lend(checkpoint, self._service.alive)

    def _wait_until_ready(self, service: "PoolService", patience: float) -> None:
        asked = time.monotonic()
        while Endpoint.read(service.endpoint) is None:
            run = look_at(service.id)
            if run.state and run.state.is_final():
                if run.state.name == INVALID:
                    raise InvalidInputs(run.state.message or INVALID)
                raise ServerFault(f"the model server's run ended: {run.state.name}, {run.state.message}")
            if run.start_time is None and time.monotonic() - asked > self._settings.start_timeout:
                raise ServerFault(f"no worker took {self._settings.serve} in {self._settings.start_timeout:.0f} s")
            if run.estimated_run_time.total_seconds() > patience + LATE:
                raise ServerFault(
                    f"the model server was not ready after {patience:.0f} s (log {service.endpoint.parent})"
                )
            time.sleep(self._settings.poll)
            if self._depot:
                self._depot.lender.take_endpoint()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            active = [*self._active, *(run.id for run in self._left.values())]
        cancel(*active)

    def _forget(self, id: UUID) -> None:
        with self._lock:
            self._active.discard(id)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputs("the flow has ended: nothing is started any more")


class PoolService:
    """A server's run; it writes its endpoint into the run's folder."""

    def __init__(self, id: UUID, folder: Path, forget: Any) -> None:
        self.id = id
        self.endpoint = folder / "endpoint.json"
        self._forget = forget

    def alive(self) -> bool:
        state = look_at(self.id).state
        return state is not None and not state.is_final()

    def stop(self) -> None:
        cancel(self.id)
        self.endpoint.unlink(missing_ok=True)
        self._forget(self.id)


def depot_of(root: Path, at_work: Collection[str]) -> "Depot":
    """The bucket that stands in for a shared disk. Raises `InvalidInputs` where there is none."""
    from flows.runtimes.by_bucket import Depot
    from steps.remote.settings import BucketSettings

    if settings := BucketSettings.from_environment():
        return Depot(root, settings, at_work)
    raise InvalidInputs("runtime.shared_disk = false needs a bucket: set BACKUP_BUCKET (.env.example tells the rest)")
