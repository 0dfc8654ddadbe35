"""Backups that failed one after the other: how many, and why the last did. Light: status reads it.

The count is kept in the run's folder, so that it goes on in the next night, and is gone once a backup succeeds.
"""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from steps.common import layout
from steps.common.artifacts import Record
from steps.common.errors import NightschoolError
from steps.common.storage import write_atomically

FILE = f"{layout.LOGS}/backup.json"


class TooManyFailures(NightschoolError):
    """Backup after backup failed: the run would go on with nothing safe but what is on this machine."""


class BackupSettings(Record):
    """How a run takes it that its backups fail. Where they go is the environment's business (BACKUP_BUCKET)."""

    stop_after_failures: int = Field(5, ge=1)
    """Failures in a row that stop the run; up to then each is tried again after the next iteration."""


class BackupFailures(Record):
    """`logs/backup.json`."""

    count: int
    """In a row."""
    reason: str
    """Of the last one."""
    when: datetime


def failures_of(root: Path) -> BackupFailures | None:
    """None where the last backup went well, or there was none."""
    try:
        return BackupFailures.model_validate_json((root / FILE).read_bytes())
    except (FileNotFoundError, ValidationError):  # a log, which nothing depends on: counted anew
        return None


def note_failure(root: Path, reason: str) -> None:
    """One more."""
    before = failures_of(root)
    now = BackupFailures(count=(before.count if before else 0) + 1, reason=reason, when=datetime.now(UTC))
    write_atomically(root / FILE, now.model_dump_json(indent=1).encode())


def note_success(root: Path) -> None:
    """The count starts anew."""
    (root / FILE).unlink(missing_ok=True)


def stop_where_too_many(root: Path, settings: BackupSettings) -> None:
    """Raises `TooManyFailures`."""
    if (failures := failures_of(root)) and failures.count >= settings.stop_after_failures:
        raise TooManyFailures(
            f"{failures.count} backups in a row failed, the last with: {failures.reason} - mend that, then run the "
            f"same again, or raise backup.stop_after_failures"
        )
