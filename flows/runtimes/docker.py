"""Each step in a container of its own, on this machine's engine.

Rollouts run whatever an agent comes up with, so their network has one other member, the model server, and no way out:
not even to this machine. Steps that play nothing have no network at all.

A container outlives a flow that is killed. The next flow removes it, unless it trains: hours of work are taken up again
where they are, by name and fingerprint.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

from docker.errors import NotFound
from docker.types import Mount
from pydantic import BaseModel
from requests.exceptions import ConnectionError, ReadTimeout

from flows.runtimes.base import Runtime, Say, Service, StepLog
from flows.runtimes.containers import (
    FINGERPRINT,
    INTERNAL,
    PATH,
    Containers,
    folder_mount,
    follow,
    image_of,
    remove,
    threads,
)
from flows.runtimes.docker_settings import DockerSettings, Gpus
from flows.runtimes.places import place_of
from flows.runtimes.process import killed_by, module_of
from flows.runtimes.served import ContainerService
from steps.agent.shard import FAILED
from steps.common.errors import InvalidInputs, StepFailed
from steps.common.step import ArtifactT, Inputs, InputsT, Step, partials_of
from steps.serving.settings import ServeInputs

PLAYS = frozenset({"rollout", "evaluate", "evaluate_model"})
"""Steps that need the model server."""
LEAVING = 10.0
"""Seconds that the last lines of a container may take to arrive."""


class DockerRuntime(Runtime):
    """Starts containers by the Docker SDK."""

    def __init__(self, root: Path, settings: DockerSettings) -> None:
        super().__init__(root.resolve())
        self._settings = settings
        self._slots = BoundedSemaphore(settings.parallel)
        self._lock = Lock()
        self._closed = False
        self._inside: dict[str, str] = {}
        """Addresses as this process knows them, and as rollouts do."""
        self._containers = Containers(self.root)
        running = [container.labels for container in self._containers.all() if container.status == "running"]
        trained = {labels[PATH] for labels in running if FINGERPRINT in labels}
        # Where a rewind has taken the folder away that it fills, it works in vain.
        self.at_work = frozenset(path for path in trained if partials_of(self.root / path))
        self._containers.sweep(spare=self.at_work)

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
        log = StepLog(self.root, step.name, path, say)
        asked = log.keep(inputs)
        command = [module_of(step), "--root", str(self.root), "--path", path, "--inputs", str(asked)]
        with self._slots:
            with self._lock:
                self._check_open()
                container = self._adopted(inputs, path, say) or self._started(step.name, inputs, path, command, env)
            try:
                self._await(container, path, timeout, log)
            finally:
                remove(container)
        return log.artifact_of(step, inputs, path)

    def _adopted(self, inputs: Inputs, path: str, say: Say) -> Any | None:
        """The container of an earlier flow that makes this very artifact."""
        container = self._containers.find(self._containers.name(path))
        if container is None or container.labels.get(FINGERPRINT) != inputs.fingerprint():
            return None
        say(f"{path}: its container goes on since {container.attrs['State']['StartedAt'][:19]}Z")
        return container

    def _started(self, step: str, inputs: Inputs, path: str, command: Sequence[str], env: Mapping[str, str]) -> Any:
        place, mounts = place_of(step), self._folders(step, path)
        settings = self._settings.train if place == "train" else self._settings.rollout
        labels, gpus = {PATH: path}, None
        if place == "train":
            labels[FINGERPRINT], gpus = inputs.fingerprint(), self._settings.gpus
            mounts += self._models(inputs)
        return self._containers.start(
            self._containers.name(path),
            image_of(settings, "train" if place == "train" else "rollout"),
            [*python(gpus), *command],
            settings,
            env=threads() | self._offline() | {name: self._inside.get(value, value) for name, value in env.items()},
            mounts=mounts,
            network=self._players() if step in PLAYS else "none",
            gpus=gpus,
            labels=labels,
        )

    def _folders(self, step: str, path: str) -> list[Mount]:
        """The run's folder, to read, and where its artifact and its failures go, to write."""
        writable = {(self.root / path).parent} | ({self.root / FAILED} if step in PLAYS else set())
        for folder in writable:
            folder.mkdir(parents=True, exist_ok=True)
        mounts = [folder_mount(folder, read_only=False) for folder in sorted(writable - {self.root})]
        return [folder_mount(self.root, read_only=self.root not in writable), *mounts]

    def _await(self, container: Any, path: str, timeout: float, log: StepLog) -> None:
        """Relays lines until the end. Raises `InvalidInputs` and `StepFailed`."""
        relay = Thread(target=follow, args=(container, log.write), daemon=True)
        relay.start()
        status = waited_for(container, timeout)
        relay.join(LEAVING)
        if status is None:
            raise log.failure(path, -signal.SIGKILL, f"was stopped after {timeout:.0f} s, its time limit")
        if status:
            raise log.failure(path, status, self._reason(container, status))

    def _reason(self, container: Any, status: int) -> str:
        if out_of_memory(container):
            limit = container.attrs["HostConfig"]["Memory"]
            return f"ran out of memory, at its limit of {limit >> 20} MiB" if limit else "the machine ran out of memory"
        return killed_by(-status) if status < 0 else ""

    def _players(self) -> str:
        return self._containers.network("players", INTERNAL, internal=True)

    def _models(self, inputs: BaseModel) -> list[Mount]:
        """Read-only: the base model, where it is a folder outside the run, and the cache."""
        base = (self.root / base_model_of(inputs)).resolve()  # as the run's link to it says; a hub id leads nowhere
        folders = [base] if base.is_dir() and not base.is_relative_to(self.root) else []
        return [folder_mount(folder, read_only=True) for folder in (*folders, *self._cache())]

    def _cache(self) -> list[Path]:
        return [self._settings.model_cache.expanduser().resolve()] if self._settings.model_cache else []

    def _offline(self) -> dict[str, str]:
        cache = [("HF_HUB_CACHE", str(folder)) for folder in self._cache()]
        return {"HF_HUB_OFFLINE": "1", **dict(cache)}

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        with self._lock:
            self._check_open()
            service = ContainerService.start(
                self._containers,
                inputs,
                self._settings.serve,
                python(self._settings.gpus),
                players=self._players(),
                models=self._models(inputs),
                env=threads() | self._offline(),
                gpus=self._settings.gpus,
                say=say,
            )
        service.wait_until_ready()
        self._inside[service.outside_url] = service.INSIDE_URL
        return service

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._containers.sweep()
            self._containers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputs("the flow has ended: nothing is started any more")


def base_model_of(inputs: BaseModel) -> str:
    """The base model of what a step trains or serves; empty where it makes one."""
    for holder in (inputs, getattr(inputs, "checkpoint", None)):
        if base := getattr(holder, "base_model", None):
            return str(base)
    return ""


def python(gpus: Gpus | None) -> list[str]:
    """How a module is run, with a look for its GPUs where it was promised some."""
    if gpus is None:
        return ["python", "-m"]
    return ["python", "-m", "steps.common.gpus", str(len(gpus) if isinstance(gpus, list) else gpus)]


def waited_for(container: Any, timeout: float) -> int | None:
    """Exit status of a container, negative for a signal; None where it was killed `timeout` seconds after its start."""
    container.reload()
    started = datetime.fromisoformat(container.attrs["State"]["StartedAt"][:19]).replace(tzinfo=UTC)
    deadline = time.monotonic() + timeout - (datetime.now(UTC) - started).total_seconds()
    try:
        status = int(container.wait(timeout=max(1.0, deadline - time.monotonic()))["StatusCode"])
    except (ReadTimeout, ConnectionError):
        if time.monotonic() < deadline:
            raise StepFailed(f"lost the engine that runs {container.name}") from None
        container.kill()
        return None
    except NotFound:
        raise StepFailed(f"{container.name} was removed while it worked") from None
    # As shells and `docker run` tell signals; 202 is far beyond.
    return 128 - status if 128 < status <= 128 + signal.NSIG else status


def out_of_memory(container: Any) -> bool:
    """Whether the kernel killed something in it for its memory."""
    try:
        container.reload()
    except NotFound:
        return False
    return bool(container.attrs["State"]["OOMKilled"])
