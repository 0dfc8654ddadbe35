"""A model server in a container: `python -m steps.serve`, with two faces.

Rollouts know it as `model` on their network. The flow, which is on this machine, knows a port of its loopback.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, Self

from docker.errors import NotFound
from docker.types import Mount

from flows.runtimes.base import Say, reason_in
from flows.runtimes.containers import (
    NO_WAY_OUT,
    Containers,
    folder_mount,
    follow,
    image_of,
    remove,
)
from flows.runtimes.docker_settings import ContainerSettings, Gpus
from flows.runtimes.service import FOLDER, POLL, STOPPING
from steps.common.errors import DO_NOT_RETRY, InvalidInputs, ServerFault
from steps.common.storage import write_atomically
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs

PORT = 8000
"""Inside."""


class ContainerService:
    """A server's container; `endpoint` says where this process finds it."""

    INSIDE_URL = f"http://model:{PORT}/v1"

    def __init__(self, container: Any, folder: Path, inputs: ServeInputs, say: Say) -> None:
        self.endpoint = folder / "endpoint.json"
        self._inside = folder / "inside.json"
        self._container = container
        self._inputs = inputs
        self._last: deque[str] = deque(maxlen=20)
        self._reader = Thread(target=self._relay, args=(say,), daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        containers: Containers,
        inputs: ServeInputs,
        settings: ContainerSettings,
        python: Sequence[str],
        *,
        players: str,
        models: Sequence[Mount],
        env: Mapping[str, str],
        gpus: Gpus | None,
        say: Say,
    ) -> Self:
        """Starts the container; `wait_until_ready` comes next."""
        root, folder = containers.root, containers.root / FOLDER
        for old in (folder / "endpoint.json", folder / "inside.json"):
            old.unlink(missing_ok=True)
        write_atomically(folder / "inputs.json", inputs.model_dump_json(indent=1).encode())
        command = ["steps.serve", "--root", str(root), "--inputs", str(folder / "inputs.json"), "--no-lifeline"]
        command += ["--endpoint", str(folder / "inside.json"), "--log", str(folder / "vllm.log")]
        command += ["--host", "0.0.0.0", "--port", str(PORT)]
        container = containers.start(
            containers.name("serve"),
            image_of(settings, "serve"),
            [*python, *command],
            settings,
            env=env,
            mounts=[folder_mount(root, read_only=True), folder_mount(folder, read_only=False), *models],
            network=containers.network("front", NO_WAY_OUT, internal=False),
            ports={f"{PORT}/tcp": ("127.0.0.1", None)},
            join={players: "model"},
            gpus=gpus,
        )
        return cls(container, folder, inputs, say)

    @property
    def outside_url(self) -> str:
        """Where this machine finds it, `/v1` included."""
        self._container.reload()
        return f"http://127.0.0.1:{self._container.ports[f'{PORT}/tcp'][0]['HostPort']}/v1"

    def alive(self) -> bool:
        try:
            self._container.reload()
        except NotFound:
            return False
        return bool(self._container.status == "running")

    def stop(self) -> None:
        try:
            self._container.stop(timeout=int(STOPPING))
        except NotFound:
            pass
        else:
            self._reader.join(1.0)
            remove(self._container)
        self._forget()

    def wait_until_ready(self) -> None:
        """Returns once it has answered. Raises `InvalidInputs` and `ServerFault`, and is stopped then."""
        try:
            self._publish(self._answering())
        except BaseException:
            self.stop()
            raise

    def _answering(self) -> Endpoint:
        patience = self._inputs.settings.startup_timeout + STOPPING
        end = time.monotonic() + patience
        while (endpoint := Endpoint.read(self._inside)) is None:
            if not self.alive():
                raise self._failure()
            if time.monotonic() > end:
                raise ServerFault(f"the model server was not ready after {patience:.0f} s (log {self._inside.parent})")
            time.sleep(POLL)
        return endpoint

    def _publish(self, inside: Endpoint) -> None:
        inside.model_copy(update={"base_url": self.outside_url}).write(self.endpoint)

    def _failure(self) -> InvalidInputs | ServerFault:
        self._reader.join(1.0)
        line = reason_in(self._last)
        try:
            status = self._container.wait(timeout=STOPPING)["StatusCode"]
        except NotFound:
            return ServerFault("the model server's container was removed while it started")
        if status == DO_NOT_RETRY:
            return InvalidInputs(line)
        return ServerFault(f"the model server ended while starting: {line} (log {self._inside.parent})")

    def _forget(self) -> None:
        for file in (self.endpoint, self._inside):
            file.unlink(missing_ok=True)

    def _relay(self, say: Say) -> None:
        def both(line: str) -> None:
            self._last.append(line)
            say(line)

        follow(self._container, both)
