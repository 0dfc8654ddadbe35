"""How a run's backups go, from what lies in its folder: how far it is backed up, and how often that failed of late.

Light, and asks no bucket: status and the flow read it. The count of failures in a row is kept in the folder, so that
it goes on in the next night; it is gone once a backup succeeds.
"""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from steps.common import layout
from steps.common.artifacts import Record
from steps.common.errors import NightschoolError
from steps.common.receipts import Sent, finished, receipts
from steps.common.storage import write_atomically

FILE = f"{layout.LOGS}/backup.json"


class TooManyFailures(NightschoolError):
    """Backup after backup failed: the run would go on with nothing safe but what is on this machine."""


class BackupSettings(Record):
    """How a run takes it that its backups fail. Where they go is the environment's business (BACKUP_BUCKET)."""

    stop_after_failures: int = Field(5, ge=1)
    """Failures in a row that stop the run; up to then each is tried again after the next iteration."""


class BackupStatus(Record):
    """What was sent, and what is still to be."""

    to: str | None
    """Where the last backup went; None where none succeeded."""
    artifacts: int
    """Of those that are finished now, so many are there."""
    missing: int
    """And so many are not."""
    failures: int
    """Backups in a row that failed, up to now."""
    reason: str | None
    """Of the last failure."""


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


def backup_of(root: Path) -> BackupStatus | None:
    """None where no backup was ever tried. Raises `CorruptArtifact`."""
    sent, failures = list(receipts(root)), failures_of(root)
    if not sent and failures is None:
        return None
    to = sent[-1].to if sent else None
    holds = {path: artifact for receipt in sent if receipt.to == to for path, artifact in receipt.holds.items()}
    is_there = [holds.get(path) == Sent.of(manifest) for path, manifest in finished(root)]
    return BackupStatus(
        to=to,
        artifacts=is_there.count(True),
        missing=is_there.count(False),
        failures=failures.count if failures else 0,
        reason=failures.reason if failures else None,
    )
