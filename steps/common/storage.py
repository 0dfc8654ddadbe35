"""Durable files: written aside, synced, renamed into place, so that a reader or a crash never sees half of one."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

CHUNK = 1 << 20


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with `content`; after a crash there is the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_under(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, in a fixed order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
