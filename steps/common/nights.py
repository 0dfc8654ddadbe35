"""Nights: how far a run is to get on a date. Fixed when the night starts, kept in `nights/<date>.json`.

So a night that crashed and is tried again ends where it was to end, and a second one of the same date adds nothing.
"""

from datetime import date
from pathlib import Path

from pydantic import ValidationError

from steps.common import layout
from steps.common.artifacts import Record, read_manifest
from steps.common.errors import CorruptArtifact
from steps.common.runs import locked
from steps.common.storage import write_atomically


class Night(Record):
    """From checkpoint `first` to checkpoint `last`."""

    date: date
    first: int
    last: int


def fix_night(root: Path, day: date, iterations: int) -> Night:
    """The night of `day`: as it was fixed, or `iterations` more than there are, fixed now.

    Raises `RunInUse`, and `CorruptArtifact` where its file can't be understood.
    """
    file = root / layout.night(day)
    with locked(root):
        if file.exists():
            return _read(file)
        first = newest_checkpoint(root)
        night = Night(date=day, first=first, last=first + iterations)
        write_atomically(file, night.model_dump_json(indent=1).encode())
        return night


def newest_checkpoint(root: Path) -> int:
    """The number of the last finished checkpoint in a row from 0; 0 where there is none."""
    count = 0
    while read_manifest(root / layout.checkpoint(count)):
        count += 1
    return max(count - 1, 0)


def _read(file: Path) -> Night:
    try:
        return Night.model_validate_json(file.read_text())
    except ValidationError as error:
        raise CorruptArtifact(
            f"{file} can't be read ({error.errors()[0]['msg']}): remove it, and a new target is fixed"
        ) from None
