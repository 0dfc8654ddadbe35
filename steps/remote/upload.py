"""Puts a file or some bytes into a bucket, never over an object that the caller has not seen.

The server compares what arrives with sha256 sums taken here: of the whole where it travels at once, of each part else,
the whole being compared with what it shall be before the parts are joined. A large file that fails leaves no parts;
one whose process is killed does, and `stale.py` finds them.
"""

import base64
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from steps.common.artifacts import FileEntry
from steps.common.errors import CorruptArtifact, NightschoolError
from steps.remote.bucket import PART, Bucket, side_by_side
from steps.remote.errors import Absent, Occupied

MOST_PARTS = 10_000
"""As many as S3 takes."""


def put_file(
    bucket: Bucket, key: str, file: Path, entry: FileEntry, metadata: dict[str, str], replaced: str | None = None
) -> None:
    """Puts a file, whose content shall be `entry`, where there is nothing, or over the object with the ETag `replaced`.

    Raises `Occupied` where something else is there, `CorruptArtifact` where the file is not what it shall be.
    """
    metadata = {**metadata, "sha256": entry.sha256}
    if entry.bytes > PART:
        _put_parts(bucket, key, file, entry, metadata, replaced)
    else:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise _changed(file)
        put_bytes(bucket, key, content, metadata, replaced)


def put_bytes(bucket: Bucket, key: str, content: bytes, metadata: dict[str, str], replaced: str | None = None) -> None:
    """Puts an object where there is nothing, or over the one with the ETag `replaced`. Raises `Occupied`."""
    checksum = _base64(hashlib.sha256(content).digest())
    options = bucket.settings.put_options() | _condition(replaced)
    bucket.call("put_object", Key=key, Body=content, ChecksumSHA256=checksum, Metadata=metadata, **options)


def overwrite(bucket: Bucket, key: str, content: bytes) -> None:
    """Puts an object, whatever is there."""
    digest = hashlib.sha256(content)
    metadata = {"sha256": digest.hexdigest()}
    options = bucket.settings.put_options()
    checksum = _base64(digest.digest())
    bucket.call("put_object", Key=key, Body=content, ChecksumSHA256=checksum, Metadata=metadata, **options)


class _Part(NamedTuple):
    number: int
    content: bytes
    checksum: str


def _put_parts(
    bucket: Bucket, key: str, file: Path, entry: FileEntry, metadata: dict[str, str], replaced: str | None
) -> None:
    options = bucket.settings.put_options()
    begun = bucket.call("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256", Metadata=metadata, **options)
    upload = {"Key": key, "UploadId": begun["UploadId"]}
    whole = hashlib.sha256()

    def put(part: _Part) -> dict[str, Any]:
        numbered = {"PartNumber": part.number, "ChecksumSHA256": part.checksum}
        return numbered | {"ETag": bucket.call("upload_part", Body=part.content, **upload, **numbered)["ETag"]}

    try:
        parts = list(side_by_side(put, _parts(file, entry.bytes, whole)))
        if whole.hexdigest() != entry.sha256:
            raise _changed(file)
        bucket.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload, **_condition(replaced))
    except BaseException:
        with suppress(NightschoolError):  # the first error counts; parts that stay are found later
            abort(bucket, key, begun["UploadId"])
        raise


def abort(bucket: Bucket, key: str, upload: str) -> None:
    """Deletes the parts of an upload that was not completed."""
    with suppress(Occupied, Absent):  # it was completed, or aborted, meanwhile
        bucket.call("abort_multipart_upload", Key=key, UploadId=upload)


def _parts(file: Path, size: int, whole: "hashlib._Hash") -> Iterator[_Part]:
    """The file's parts; feeds `whole` with each."""
    length = max(PART, -(-size // MOST_PARTS))
    with file.open("rb") as source:
        number = 0
        while content := source.read(length):
            number += 1
            whole.update(content)
            yield _Part(number, content, _base64(hashlib.sha256(content).digest()))


def _condition(replaced: str | None) -> dict[str, str]:
    return {"IfMatch": replaced} if replaced else {"IfNoneMatch": "*"}


def _changed(file: Path) -> CorruptArtifact:
    return CorruptArtifact(
        f"{file} differs from its manifest, and was not backed up: move {file.parent} away to make it again"
    )


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
