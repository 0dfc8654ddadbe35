"""Compares a run in the bucket with the manifests there, and with the run here where there is one."""

from collections.abc import Iterator
from pathlib import Path

from steps.common.artifacts import FileEntry
from steps.common.errors import CorruptArtifact
from steps.common.receipts import Sent, finished
from steps.remote.bucket import side_by_side
from steps.remote.fetch import check, lacking
from steps.remote.inventory import RemoteArtifact, RemoteRun


def remote_damages(remote: RemoteRun, deep: bool = False) -> Iterator[tuple[str, str | None]]:
    """Every finished artifact in the bucket with what is wrong with it, or None.

    By sizes and the sums that were noted when the files were put; `deep` reads each file instead.
    """
    for path in remote.finished():
        try:
            yield path, _damage(remote, remote.artifact(path), deep)
        except CorruptArtifact as error:
            yield path, str(error)


def differences(remote: RemoteRun, root: Path) -> Iterator[str]:
    """What is finished here and not in the bucket, or is another there."""
    there = set(remote.finished())
    for path, manifest in finished(root):
        if path not in there:
            if not remote.is_pruned(path):
                yield f"{root / path} is not in {remote.url}"
        elif Sent.of(remote.artifact(path).manifest) != Sent.of(manifest):
            yield f"{root / path} is another than in {remote.url}"


def _damage(remote: RemoteRun, artifact: RemoteArtifact, deep: bool) -> str | None:
    if artifact.lacking:
        return lacking(remote, artifact)

    def is_whole(file: tuple[str, FileEntry]) -> bool:
        path, entry = f"{artifact.path}/{file[0]}", file[1]
        if deep:
            return check(remote, path, entry)
        head = remote.bucket.head(remote.key(path))
        return head is not None and head.metadata.get("sha256", entry.sha256) == entry.sha256

    files = artifact.manifest.files.items()
    for (name, _), whole in zip(files, map(is_whole, files) if deep else side_by_side(is_whole, files), strict=True):
        if not whole:
            return f"{remote.url}/{artifact.path}/{name} differs from its manifest: the sha256 is another"
    return None
