"""A model server on this machine: `python -m steps.serve` in its own environment, as a child that ends when we do."""

import os
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Self

from flows.runtimes.base import Say, reason_in
from flows.runtimes.places import python_of
from steps.common import layout
from steps.common.errors import DO_NOT_RETRY, InvalidInputs, ServerFault
from steps.common.runs import in_use
from steps.common.storage import write_atomically
from steps.serving.command import HOST
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs

FOLDER = f"{layout.LOGS}/serve"
DAY = layout.DAY
KEY = "NIGHTSCHOOL_SERVE_KEY"
"""Environment variable: the key that a server is to ask for, in place of one that it makes up."""
POLL = 0.1
STOPPING = 30.0
"""Seconds that the server may take to end before it is killed."""


class LocalService:
    """The server's supervisor process. It ends, with all that it started, when its stdin does."""

    def __init__(self, process: subprocess.Popen[str], endpoint: Path, say: Say) -> None:
        self.endpoint = endpoint
        self._process = process
        self._last: deque[str] = deque(maxlen=20)
        self._reader = Thread(target=self._relay, args=(say,), daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        root: Path,
        inputs: ServeInputs,
        say: Say,
        host: str = HOST,
        *,
        port: int = 0,
        key: str | None = None,
        folder: str = FOLDER,
    ) -> Self:
        """Starts the server on a port of the address `host`, a free one where it is 0, and waits until it is ready.

        Its files are in the run's `folder`. It makes up a key where none is given. Raises `InvalidInputs` and
        `ServerFault`.
        """
        endpoint, asked = root / folder / "endpoint.json", root / folder / "inputs.json"
        endpoint.unlink(missing_ok=True)
        write_atomically(asked, inputs.model_dump_json(indent=1).encode())
        command = [str(python_of("serve")), "-m", "steps.serve", "--root", str(root), "--inputs", str(asked)]
        command += ["--endpoint", str(endpoint), "--log", str(endpoint.with_name("vllm.log"))]
        command += ["--host", host, "--port", str(port)]
        env = {name: value for name, value in os.environ.items() if name != KEY}
        process = subprocess.Popen(
            command,
            env={**env, KEY: key} if key else env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        service = cls(process, endpoint, say)
        try:
            service._wait_until_ready(inputs.settings.startup_timeout + STOPPING)
        except BaseException:
            service.stop()
            raise
        return service

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        self.endpoint.unlink(missing_ok=True)

    def _wait_until_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self.endpoint.exists():
            if not self.alive():
                raise self._failure()
            if time.monotonic() > end:
                raise ServerFault(f"the model server was not ready after {timeout:.0f} s (log {self.endpoint.parent})")
            time.sleep(POLL)

    def _failure(self) -> InvalidInputs | ServerFault:
        self._reader.join(1.0)
        line = reason_in(self._last)
        if self._process.returncode == DO_NOT_RETRY:
            return InvalidInputs(line)
        return ServerFault(f"the model server ended while starting: {line} (log {self.endpoint.parent})")

    def _relay(self, say: Say) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line.rstrip("\n"))
                say(line.rstrip("\n"))


def served_by_day(root: Path) -> Iterator[tuple[int, str]]:
    """The checkpoints of a run that are served to agents on this machine, and where."""
    for iteration in layout.numbered(root, DAY):
        folder = root / DAY / f"{iteration:04d}"
        if in_use(folder) and (endpoint := Endpoint.read(folder / "endpoint.json")):
            yield iteration, endpoint.base_url
