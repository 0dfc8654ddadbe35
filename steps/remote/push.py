"""Puts one artifact of a run into a bucket, its manifest last. Done again, it sends what is not there yet.

Files are put one after the other, in a fixed order, and only where nothing is: of two machines that send different
artifacts to one path, the first that puts a file which differs wins, and the other stops there. Large files travel in
parts, side by side.
"""

import hashlib
import platform
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import FileEntry, Manifest, check_files, read_manifest
from steps.common.errors import CorruptArtifact
from steps.common.receipts import Sent
from steps.remote.bucket import Head
from steps.remote.errors import BackupConflict, BucketFault, Occupied
from steps.remote.inventory import PRUNED, STALE, RemoteArtifact, RemoteRun
from steps.remote.upload import put_bytes, put_file

RACES = 3
"""Times to look again at an object that appeared or went at the same moment."""


def push(
    remote: RemoteRun, root: Path, path: str, ours: Collection[tuple[str, str]] = (), owner: str | None = None
) -> Manifest:
    """Has the artifact at `root/path` in the bucket, and returns its manifest.

    Another one at that path is set aside where it is one of `ours`, by path and digest, or was put for the same
    `owner`: this folder, or the one of the flow that this machine works for. Raises `BackupConflict` where it is
    neither, `CorruptArtifact` where a file is not what the manifest says, `BucketFault`.
    """
    manifest = read_manifest(root / path)
    if manifest is None:
        raise CorruptArtifact(f"{root / path} has no {layout.MANIFEST}: it was never finished")
    check_files(root / path, manifest)
    pusher = _Pusher(remote, root, path, manifest, owner or name_of(root))
    pusher.make_room(ours)
    for name, entry in sorted(manifest.files.items()):
        pusher.place(name, entry)
    pusher.finish()
    return manifest


def set_aside(remote: RemoteRun, artifact: RemoteArtifact) -> None:
    """Moves an artifact to `superseded/` in the bucket: a copy, then a deletion. Killed between, the same ends it."""
    path = artifact.path
    aside = f"{layout.SUPERSEDED}/{artifact.modified.astimezone(UTC):%Y-%m-%dT%H%M%SZ}/{path}"
    files = [name for name in artifact.manifest.files if f"{path}/{name}" in remote.objects]
    for name in (*files, layout.MANIFEST):
        remote.bucket.copy(remote.key(f"{path}/{name}"), remote.key(f"{aside}/{name}"))
    for name in (layout.MANIFEST, *files):
        remote.bucket.delete(remote.key(f"{path}/{name}"))
        del remote.objects[f"{path}/{name}"]


def name_of(root: Path) -> str:
    """Who puts objects: this machine, and this folder on it."""
    place = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:8]
    return f"{platform.node() or 'unknown'}/{place}".encode("ascii", "replace").decode()


def owner_of(there: Head) -> str | None:
    """For which folder an object was put, as `name_of` names it: the run's, wherever its steps run."""
    return there.metadata.get("for") or there.metadata.get("by")


def conflict(
    remote: RemoteRun, root: Path, path: str, head: Head | None, there: RemoteArtifact | None = None
) -> BackupConflict:
    """The error where another's artifact, or part of one, is at a path."""
    who = (head and head.metadata.get("by")) or "somebody"
    when = f" on {head.modified:%Y-%m-%d at %H:%M:%S} UTC" if head else ""
    did = f"put there by {who}{when}" if there else f"being sent there by {who}{when}, or was when that stopped"
    return BackupConflict(
        f"{remote.url}/{path} was {did}, and is not the one in {root}: two machines back up one "
        f"run; give this one another name or BACKUP_PREFIX, or go on from theirs with `nightschool restore`"
    )


class _Pusher:
    def __init__(self, remote: RemoteRun, root: Path, path: str, manifest: Manifest, owner: str) -> None:
        self.remote, self.root, self.path, self.manifest = remote, root, path, manifest
        self.metadata = {"by": name_of(root), "for": owner}

    def make_room(self, ours: Collection[tuple[str, str]]) -> None:
        """Sets aside what an earlier artifact of this run has left at the path."""
        if f"{self.path}/{layout.MANIFEST}" not in self.remote.objects:
            return
        there = self.remote.artifact(self.path)
        if Sent.of(there.manifest) == Sent.of(self.manifest):
            return
        head = self.remote.bucket.head(self._key(layout.MANIFEST))
        if (self.path, there.manifest.digest) not in ours and not (head and owner_of(head) == self.metadata["for"]):
            raise self._conflict(head, there)
        set_aside(self.remote, there)

    def place(self, name: str, entry: FileEntry) -> None:
        """Puts one file, unless it is there."""
        key, file = self._key(name), self.root / self.path / name
        listed = f"{self.path}/{name}" in self.remote.objects
        for _ in range(RACES):
            there = self.remote.bucket.head(key) if listed else None
            if there and (there.metadata.get("sha256"), there.bytes) == (entry.sha256, entry.bytes):
                return
            if there and not self._is_mine(there) and there.modified > datetime.now(UTC) - STALE:
                raise self._conflict(there)
            try:
                put_file(self.remote.bucket, key, file, entry, self.metadata, there.etag if there else None)
                return
            except Occupied:
                listed = True
        raise self._restless()

    def finish(self) -> None:
        """Puts the manifest, where there is none."""
        content = (self.root / self.path / layout.MANIFEST).read_bytes()
        metadata = self.metadata | {"sha256": hashlib.sha256(content).hexdigest(), "digest": self.manifest.digest}
        key = self._key(layout.MANIFEST)
        for _ in range(RACES):
            there = self.remote.bucket.head(key)
            if there:
                self.remote.objects[f"{self.path}/{layout.MANIFEST}"] = there
                other = self.remote.artifact(self.path)
                if Sent.of(other.manifest) != Sent.of(self.manifest):
                    raise self._conflict(there, other)
                break
            try:
                put_bytes(self.remote.bucket, key, content, metadata)
                break
            except Occupied:
                continue
        else:
            raise self._restless()
        if f"{self.path}/{PRUNED}" in self.remote.objects:
            self.remote.bucket.delete(self._key(PRUNED))

    def _is_mine(self, there: Head) -> bool:
        return there.metadata.get("by") == self.metadata["by"]

    def _key(self, name: str) -> str:
        return self.remote.key(f"{self.path}/{name}")

    def _conflict(self, head: Head | None, there: RemoteArtifact | None = None) -> BackupConflict:
        return conflict(self.remote, self.root, self.path, head, there)

    def _restless(self) -> BucketFault:
        return BucketFault(f"{self.remote.url}/{self.path} is changed by another machine all the time: try again later")
