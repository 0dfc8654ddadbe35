"""What a bucket holds of a run, from one listing and the manifests: finished artifacts, and what is no part of any."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from steps.common import layout
from steps.common.artifacts import Manifest, Record, digest_of
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.remote.bucket import Bucket, Object, side_by_side
from steps.remote.errors import Absent, Occupied
from steps.remote.upload import abort, overwrite

PRUNED = "pruned.json"
"""The manifest of an artifact that was deleted on purpose: it is not sent again, and a restored run goes on past it."""
STALE = timedelta(hours=1)
"""After so long without a sign of life, what was half sent counts as given up."""


class RemoteArtifact(Record):
    """A finished artifact in the bucket."""

    path: str
    """Relative to the run's folder; what was replaced is under `superseded/<UTC time>/`."""
    manifest: Manifest
    content: bytes
    """Of the manifest's file."""
    bytes: int
    """Of all its files."""
    modified: datetime
    """When it was finished."""
    lacking: tuple[str, ...]
    """Files that are missing, or have another size than the manifest says."""


class Unfinished(Record):
    """Files in the bucket that belong to no manifest."""

    path: str
    files: int
    bytes: int
    modified: datetime


class Upload(Record):
    """A multipart upload that was not completed: its parts are stored, and paid for."""

    path: str
    id: str
    initiated: datetime
    active: datetime
    """When its last part came."""
    bytes: int


class RemoteRun:
    """A run's folder in a bucket, or some folders in that, as one listing showed them."""

    def __init__(self, bucket: Bucket, run: str, *folders: str) -> None:
        self.bucket, self.run = bucket, run
        self.url = bucket.settings.url(run)
        prefixes, own = [self.key(f"{folder}/") for folder in folders] or [self.key()], self.key()
        self.objects: dict[str, Object] = {
            found.key.removeprefix(own): found for prefix in prefixes for found in bucket.list(prefix)
        }
        """By path, relative to the run's folder."""

    def key(self, path: str = "") -> str:
        """The object's key."""
        return self.bucket.settings.key(self.run, path)

    def finished(self) -> list[str]:
        """Paths of the folders with a manifest, also of those that were set aside."""
        end = f"/{layout.MANIFEST}"
        return sorted(path.removesuffix(end) for path in self.objects if path.endswith(end))

    def is_pruned(self, path: str) -> bool:
        """Was the artifact deleted on purpose?"""
        return f"{path}/{PRUNED}" in self.objects and f"{path}/{layout.MANIFEST}" not in self.objects

    def pruned(self) -> list[str]:
        """Paths of what was deleted on purpose."""
        end = f"/{PRUNED}"
        return sorted(
            path.removesuffix(end)
            for path in self.objects
            if path.endswith(end) and self.is_pruned(path.removesuffix(end))
        )

    def lacking(self, path: str, manifest: Manifest) -> tuple[str, ...]:
        """Files of an artifact that are not there with their sizes."""
        there = {name: self.objects.get(f"{path}/{name}") for name in manifest.files}
        return tuple(
            name
            for name, entry in manifest.files.items()
            if (found := there[name]) is None or found.bytes != entry.bytes
        )

    def artifact(self, path: str) -> RemoteArtifact:
        """A finished artifact. Raises `CorruptArtifact` where its manifest is damaged or gone."""
        found = self.objects[f"{path}/{layout.MANIFEST}"]
        content = self._whole(found)
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise CorruptArtifact(f"{self.url}/{path} has a manifest that can't be read: {_first(error)}") from None
        if digest_of(manifest.files) != manifest.digest:
            raise CorruptArtifact(f"{self.url}/{path} has a manifest whose digest is not that of its files")
        return RemoteArtifact(
            path=path,
            manifest=manifest,
            content=content,
            bytes=found.bytes + sum(entry.bytes for entry in manifest.files.values()),
            modified=found.modified,
            lacking=self.lacking(path, manifest),
        )

    def artifacts(self) -> list[RemoteArtifact]:
        """All finished artifacts, by path. Raises `CorruptArtifact`."""
        return list(side_by_side(self.artifact, self.finished()))

    def unfinished(self) -> Iterator[Unfinished]:
        """Folders with files of no manifest: an upload is under way, or was given up."""
        finished = tuple(f"{path}/" for path in self.finished())
        loose = [
            found
            for path, found in sorted(self.objects.items())
            if not path.startswith((*finished, f"{layout.LOGS}/"))
            and not is_plain(path)
            and not path.endswith(f"/{PRUNED}")
        ]
        for folder, group in groupby(loose, key=lambda found: found.key.rpartition("/")[0]):
            files = list(group)
            yield Unfinished(
                path=folder.removeprefix(self.key()),
                files=len(files),
                bytes=sum(file.bytes for file in files),
                modified=max(file.modified for file in files),
            )

    def uploads(self) -> list[Upload]:
        """Multipart uploads that were not completed."""
        found: list[Upload] = []
        more: dict[str, Any] = {}
        while True:
            page = self.bucket.call("list_multipart_uploads", Prefix=self.key(), **more)
            found += [self._upload(upload["Key"], upload) for upload in page.get("Uploads", [])]
            if not page["IsTruncated"]:
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def clear_uploads(self) -> list[Upload]:
        """Deletes the parts of uploads to which nothing was added for a while; returns these."""
        stale = [upload for upload in self.uploads() if upload.active < datetime.now(UTC) - STALE]
        for upload in stale:
            abort(self.bucket, self.key(upload.path), upload.id)
        return stale

    def delete(self, artifact: RemoteArtifact) -> None:
        """Deletes an artifact: its manifest first, so that there is no moment at which it is there in part.

        A manifest stays, as it does where a run's own files are pruned.
        """
        if not artifact.path.startswith(layout.SUPERSEDED):
            self.note_pruned(artifact.path, artifact.manifest.model_copy(update={"pruned": datetime.now(UTC)}))
        for name in (layout.MANIFEST, *artifact.manifest.files):
            self.bucket.delete(self.key(f"{artifact.path}/{name}"))
            self.objects.pop(f"{artifact.path}/{name}", None)

    def note_pruned(self, path: str, manifest: Manifest) -> None:
        """Says what was at a path, and when it was deleted."""
        overwrite(self.bucket, self.key(f"{path}/{PRUNED}"), manifest.model_dump_json(indent=1).encode())

    def _whole(self, found: Object) -> bytes:
        """A small object's bytes, compared with the sum that was noted when it was put."""
        try:
            content = self.bucket.read(found)
        except (Absent, Occupied):
            raise CorruptArtifact(f"{self._url(found)} changed just now: another machine is at work there") from None
        head = self.bucket.head(found.key)
        noted = head.metadata.get("sha256") if head else None
        if noted and noted != sha256(content).hexdigest():
            raise CorruptArtifact(f"{self._url(found)} is damaged: its sha256 is another than when it was put")
        return content

    def plain(self, path: str) -> bytes:
        """A small file that is no artifact. Raises `CorruptArtifact` where it is damaged."""
        return self._whole(self.objects[path])

    def _upload(self, key: str, upload: dict[str, Any]) -> Upload:
        parts = self.bucket.call("list_parts", Key=key, UploadId=upload["UploadId"]).get("Parts", [])
        return Upload.model_validate(
            {
                "path": key.removeprefix(self.key()),
                "id": upload["UploadId"],
                "initiated": upload["Initiated"],
                "active": max([upload["Initiated"], *(part["LastModified"] for part in parts)]),
                "bytes": sum(part["Size"] for part in parts),
            }
        )

    def _url(self, found: Object) -> str:
        return f"s3://{self.bucket.settings.bucket}/{found.key}"


def is_plain(path: str) -> bool:
    """Is it one of the run's small files that are no artifacts: records, reports, nights, a judge's answers?"""
    folder, _, name = path.rpartition("/")
    return folder in ("", "nights", layout.JUDGE) and name.endswith((".json", ".html"))


def runs_in(bucket: Bucket) -> list[str]:
    """Names of the runs in a bucket."""
    return sorted(name for name in bucket.folders(bucket.settings.key("")) if name)


def no_such_run(bucket: Bucket, run: str) -> InvalidInputs:
    """The error that names those there are."""
    there = ", ".join(runs_in(bucket)) or "none"
    return InvalidInputs(f"there is no run {run!r} in {bucket.settings.url()}: there are {there}")


def _first(error: ValidationError) -> str:
    return str(error.errors()[0]["msg"])
