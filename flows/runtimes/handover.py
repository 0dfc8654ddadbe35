"""How a step on another machine gets what it is asked for, and how its lines and its artifact come back.

With a shared disk all of that lies where both sides find it. Without, it goes through a bucket (`by_bucket`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flows.runtimes.base import Say
from steps.common import layout
from steps.common.step import Inputs
from steps.common.storage import write_atomically


class Handover(Protocol):
    """The flow's side of one attempt at a step."""

    log: Path
    """The step's log here."""
    missing: str
    """What to say where the step ended well and its artifact did not come."""
    parameters: Mapping[str, str]
    """What the step's flow run must be told of it."""

    def collect(self) -> None:
        """Has the artifact here where the step has made it."""

    def offer(self, env: Mapping[str, str]) -> None:
        """Lays ready what the step needs."""

    def relay(self) -> None:
        """Passes on what the step has said since the last time, where that is seen before its end."""

    def clear(self) -> None:
        """Takes away what was laid ready, with its secrets: the step has ended."""


class DiskHandover:
    """By the runs folder, which the step's machine has mounted."""

    missing = "here: is this the folder its machine has?"
    parameters: Mapping[str, str] = {}

    def __init__(self, root: Path, step: str, inputs: Inputs, path: str, say: Say) -> None:
        self.log = root / layout.log(step, path)
        self._inputs = inputs
        self._lines = Lines(self.log, say)

    def collect(self) -> None:
        """It appears here by itself."""

    def offer(self, env: Mapping[str, str]) -> None:
        write_atomically(self.log.with_suffix(".json"), self._inputs.model_dump_json(indent=1).encode())
        write_for_us_only(self.log.with_suffix(".env"), json.dumps(dict(env)))

    def relay(self) -> None:
        self._lines.relay()

    def clear(self) -> None:
        self.log.with_suffix(".env").unlink(missing_ok=True)


class Lines:
    """What is new in a step's log, wherever it is written."""

    def __init__(self, file: Path, say: Say) -> None:
        self.file = file
        self._say = say
        self._read = file.stat().st_size if file.exists() else 0

    def relay(self) -> None:
        """Passes whole lines on; the rest waits for the next time."""
        try:
            with self.file.open("rb") as file:
                file.seek(self._read)
                new = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        if new:
            self._read += len(new) + 1
            for line in new.decode(errors="replace").split("\n"):
                self._say(line)


def write_for_us_only(file: Path, content: str) -> None:
    """Replaces a file by one that only its user may read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(content)
