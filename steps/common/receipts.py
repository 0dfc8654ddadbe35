"""Receipts: what this run has put into a bucket, and saw there whole. Light: status and prune read them.

    backups/0007/receipt.json      artifacts that were sent by the eighth backup that sent any

A receipt is written once all that it names is in the bucket, so what it says is true wherever the run is restored.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from steps.common import layout
from steps.common.artifacts import Artifact, Manifest, Record, read_manifest
from steps.common.errors import CorruptArtifact
from steps.common.step import Inputs

BACKUPS = "backups"
RECEIPT = "receipt.json"


class Sent(Record):
    """Which artifact it was."""

    digest: str
    fingerprint: str

    @classmethod
    def of(cls, manifest: Manifest) -> "Sent":
        """Equal artifacts, made from equal inputs, are equal here."""
        return cls(digest=manifest.digest, fingerprint=manifest.fingerprint)


class BackupInputs(Inputs):
    """What one backup sends. It is the receipt as well."""

    to: str
    """The run's place, s3://bucket/prefix/run."""
    holds: dict[str, Sent]
    """By path."""


class Backup(Artifact):
    """A backup that sent something."""

    to: str
    artifacts: int
    bytes: int
    """Of all files of these artifacts, whether they were there already or not."""


def finished(root: Path) -> Iterator[tuple[str, Manifest]]:
    """What receipts are about: every finished artifact in the run's folder but the receipts themselves, by path."""
    for path in layout.artifacts(root):
        if path.partition("/")[0] != BACKUPS and (manifest := read_manifest(root / path)):
            yield path, manifest


def written(root: Path) -> Iterator[tuple[str, Manifest]]:
    """The receipts as artifacts, oldest first, by path."""
    for number in layout.numbered(root, BACKUPS):
        if manifest := read_manifest(root / path_of(number)):
            yield path_of(number), manifest


def receipts(root: Path, to: str | None = None) -> Iterator[BackupInputs]:
    """All receipts, oldest first; only those of one place where it is given. Raises `CorruptArtifact`."""
    for path, _ in written(root):
        folder = root / path
        try:
            receipt = BackupInputs.model_validate_json((folder / RECEIPT).read_bytes())
        except (OSError, ValidationError):
            raise CorruptArtifact(f"{folder / RECEIPT} can't be read: move {folder} away, and back up again") from None
        if to in (None, receipt.to):
            yield receipt


def sent(root: Path, to: str | None = None) -> dict[str, Sent]:
    """By path, what was sent last."""
    return {path: artifact for receipt in receipts(root, to) for path, artifact in receipt.holds.items()}


def covered(root: Path, to: str | None = None) -> dict[str, str]:
    """By path, the digest of what was sent last. A path whose digest is another now is not backed up.

    Raises `CorruptArtifact` where a receipt can't be read.
    """
    return {path: artifact.digest for path, artifact in sent(root, to).items()}


def ever_sent(root: Path, to: str) -> set[tuple[str, str]]:
    """Paths and digests of all that this run has put there."""
    return {(path, artifact.digest) for receipt in receipts(root, to) for path, artifact in receipt.holds.items()}


def path_of(number: int) -> str:
    """The folder of a receipt."""
    return f"{BACKUPS}/{number:04d}"


def next_path(root: Path) -> str:
    """The folder of the next receipt."""
    return path_of(max(layout.numbered(root, BACKUPS), default=-1) + 1)
