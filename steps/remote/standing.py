"""How far a run is backed up, from what lies in its folder. Light, and asks no bucket."""

from pathlib import Path

from steps.backup import finished
from steps.common.artifacts import Record
from steps.remote.failures import failures_of
from steps.remote.receipts import Sent, receipts


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
