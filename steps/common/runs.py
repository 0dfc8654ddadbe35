"""Runs as folders: where they are, who is at work in one, what each was asked for.

A run is worked on under an exclusive lock that the kernel frees when its holder dies, however it dies.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steps.common import layout
from steps.common.artifacts import Record
from steps.common.errors import CorruptArtifact, InvalidInputs, NightschoolError
from steps.common.storage import write_atomically

RUNS = "NIGHTSCHOOL_RUNS"
"""Environment variable: the folder of all runs; without it `runs` in the working directory."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run may be called."""
PATIENCE = 2.0
"""Seconds to wait for who holds the lock for a moment only: a reader that asks whether the run is in use."""


class RunInUse(NightschoolError):
    """Another process works in the run."""


class RunRecord(Record):
    """`run.json`: what the run was last asked for, and the versions of the packages that asked."""

    config: dict[str, Any]
    versions: dict[str, str]


def runs_folder() -> Path:
    """The folder that runs are made in."""
    return Path(os.environ.get(RUNS) or "runs").absolute()


def find_run(name: str) -> Path:
    """The folder of a run, by its name under the runs folder or by its path. Raises `InvalidInputs`."""
    for folder in (runs_folder() / name, Path(name).absolute()):
        if (folder / layout.RUN).is_file():
            return folder
    there = sorted(path.parent.name for path in runs_folder().glob(f"*/{layout.RUN}"))
    raise InvalidInputs(f"there is no run {name!r} in {runs_folder()}: there {_count(there)}")


def read_record(root: Path) -> RunRecord:
    """Raises `CorruptArtifact` where `run.json` can't be understood."""
    file = root / layout.RUN
    try:
        return RunRecord.model_validate_json(file.read_text())
    except ValidationError as error:
        raise CorruptArtifact(
            f"{file} can't be read ({error.errors()[0]['msg']}): `nightschool train` writes it anew"
        ) from None


def write_record(root: Path, record: RunRecord) -> None:
    """Replaces `run.json`."""
    write_atomically(root / layout.RUN, record.model_dump_json(indent=1).encode())


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the run's lock. Raises `RunInUse`, naming the holder."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / layout.LOCK).open("a+") as file:
        end = time.monotonic() + PATIENCE
        while not _try_lock(file.fileno()):
            file.seek(0)
            holder = file.read().strip()
            if _runs(holder) or time.monotonic() > end:
                raise RunInUse(f"{root} is in use by process {holder}: wait for it, or stop it, then try again")
            time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def in_use(root: Path) -> bool:
    """Is a process at work in the run?"""
    try:
        with (root / layout.LOCK).open() as file:
            return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def _count(names: list[str]) -> str:
    return f"are {', '.join(names)}" if names else "are none"
