"""Gets one artifact out of a bucket: into a hidden folder, each file verified as it arrives, renamed at the end.

Interrupted, the same again keeps the files that have come whole.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import FileEntry, Manifest, read_manifest, verify
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.receipts import Sent
from steps.common.storage import files_under, sha256_of, sync, write_atomically
from steps.remote.bucket import PART, Object, side_by_side
from steps.remote.errors import Absent, Occupied
from steps.remote.inventory import PRUNED, RemoteArtifact, RemoteRun


def is_here(root: Path, artifact: RemoteArtifact, where: str) -> bool:
    """Is the artifact at `root`, and whole?

    Raises `InvalidInputs` where there is another one at its path, `CorruptArtifact` where it is damaged.
    """
    folder = root / artifact.path
    if (manifest := read_manifest(folder)) is None:
        if folder.exists():
            raise InvalidInputs(f"{folder} is in the way of {where}/{artifact.path}: it has no manifest; move it away")
        return False
    if Sent.of(manifest) != Sent.of(artifact.manifest):
        raise InvalidInputs(
            f"{folder} is another than {where}/{artifact.path} (made {manifest.started:%Y-%m-%d %H:%M}, there "
            f"{artifact.manifest.started:%Y-%m-%d %H:%M}): move one away, or restore under another NIGHTSCHOOL_RUNS"
        )
    if manifest.pruned:
        return False
    try:
        verify(folder)
    except CorruptArtifact:
        raise CorruptArtifact(f"{folder} is damaged: move it away, and the same command brings it back") from None
    return True


def fetch(remote: RemoteRun, artifact: RemoteArtifact, root: Path) -> None:
    """Has the artifact at `root`. Raises `CorruptArtifact` where the bucket's is damaged, `BucketFault`, `OSError`."""
    if artifact.lacking:
        raise CorruptArtifact(lacking(remote, artifact))
    target = root / artifact.path
    hidden = _hidden(target)
    hidden.mkdir(parents=True, exist_ok=True)
    for file in files_under(hidden):
        if file.relative_to(hidden).as_posix() not in artifact.manifest.files:
            file.unlink()
    for name, entry in artifact.manifest.files.items():
        file = hidden / name
        if not (file.is_file() and file.stat().st_size == entry.bytes and sha256_of(file) == entry.sha256):
            file.parent.mkdir(parents=True, exist_ok=True)
            _get(remote, f"{artifact.path}/{name}", file, entry)
    (hidden / layout.MANIFEST).write_bytes(artifact.content)
    sync(hidden / layout.MANIFEST)
    for folder in [*(path for path in hidden.rglob("*") if path.is_dir()), hidden]:
        sync(folder)
    _publish(hidden, target)


def fetch_pruned(remote: RemoteRun, path: str, root: Path) -> None:
    """Has the manifest of an artifact that was deleted on purpose at `root`, so that a run goes on past it."""
    target = root / path
    if read_manifest(target) is None:
        content = remote.plain(f"{path}/{PRUNED}")
        Manifest.model_validate_json(content)
        hidden = _hidden(target)
        shutil.rmtree(hidden, ignore_errors=True)
        write_atomically(hidden / layout.MANIFEST, content)
        _publish(hidden, target)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.restore{layout.PARTIAL}")


def _publish(hidden: Path, target: Path) -> None:
    """Renames the folder. Where a pruned one is, its files move into that, and the manifest last."""
    if target.exists():
        files = sorted(files_under(hidden), key=lambda file: file == hidden / layout.MANIFEST)
        for file in files:
            to = target / file.relative_to(hidden)
            to.parent.mkdir(parents=True, exist_ok=True)
            file.replace(to)
            sync(to.parent)
        shutil.rmtree(hidden)
    else:
        hidden.rename(target)
    sync(target.parent)


def check(remote: RemoteRun, path: str, entry: FileEntry) -> bool:
    """Downloads a file of the bucket, keeping nothing: is it what its manifest says?"""
    digest = hashlib.sha256()
    for content in _content(remote, path):
        digest.update(content)
    return digest.hexdigest() == entry.sha256


def lacking(remote: RemoteRun, artifact: RemoteArtifact) -> str:
    """What to say of an artifact whose files are not all there."""
    more = f" and {len(artifact.lacking) - 1} more" if len(artifact.lacking) > 1 else ""
    return (
        f"{remote.url}/{artifact.path} lacks {artifact.lacking[0]}{more}, or holds it with another size than its "
        f"manifest says: back it up again from a machine that has it, or restore to an earlier iteration"
    )


def _get(remote: RemoteRun, path: str, file: Path, entry: FileEntry) -> None:
    """Downloads a file; once more where it did not arrive as it shall be."""
    for _ in range(2):
        digest = hashlib.sha256()
        with file.open("wb") as to:
            for content in _content(remote, path):
                digest.update(content)
                to.write(content)
            to.flush()
            os.fsync(to.fileno())
        if digest.hexdigest() == entry.sha256:
            return
    file.unlink()
    raise CorruptArtifact(
        f"{remote.url}/{path} is damaged, its sha256 is not what its manifest says: "
        f"back it up again from a machine that has it, or restore to an earlier iteration"
    )


def _content(remote: RemoteRun, path: str) -> Iterator[bytes]:
    """A file's bytes, in order; the next few parts are on their way meanwhile."""
    found = remote.objects[path]
    try:
        yield from side_by_side(lambda span: remote.bucket.read(found, *span), _spans(found))
    except (Absent, Occupied):
        raise CorruptArtifact(f"{remote.url}/{path} changed just now: another machine is at work there") from None


def _spans(found: Object) -> Iterator[tuple[int, int] | tuple[()]]:
    if found.bytes <= PART:
        yield ()
    else:
        yield from ((first, min(PART, found.bytes - first)) for first in range(0, found.bytes, PART))


def free_space(root: Path) -> int:
    """Bytes that the run's disk has left."""
    return shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
