"""Processes that stay when the command ends, and are found again by their record.

The record counts only while a process with that number and that start time runs, so that a stranger is never stopped.
"""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from steps.common.artifacts import Record

STOPPING = 10.0
"""Seconds to end in, before it is killed."""


class Daemon(Record):
    """A process that leads a group of its own."""

    pid: int
    started: str
    """The kernel's start time of the process."""

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """The record in `file`, or None where the process has ended."""
        try:
            record = cls.model_validate_json(file.read_text())
        except (FileNotFoundError, ValidationError):
            return None
        return record if record.runs() else None

    def runs(self) -> bool:
        """Is the process still the one that was recorded?"""
        return started(self.pid) == self.started

    def stop(self) -> None:
        """Ends the group, and waits for its leader."""
        os.killpg(self.pid, signal.SIGTERM)
        end = time.monotonic() + STOPPING
        while self.runs():
            if time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.05)


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Starts a process that nothing of ours ends, with its output in `log`; returns its number."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    return process.pid


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lets one process at a time start or stop what `file` stands for; the others wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def started(pid: int) -> str | None:
    """The start time of a running process in the kernel's ticks, which tells it from a later one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
