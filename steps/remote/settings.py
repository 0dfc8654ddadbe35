"""Where backups go: this machine's settings, from the environment. Light: whoever asks only whether there are any.

Endpoint, region and credentials are botocore's own business (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, …,
~/.aws, a role), so that no secret passes through here.
"""

import os
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ValidationError

from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs


class BucketSettings(Record):
    """A place for runs in a bucket."""

    bucket: str
    prefix: str = ""
    """Folder of all runs in the bucket, without slashes at its ends."""
    path_style: Literal["auto", "path", "virtual"] = "auto"
    """Is the bucket named in the URL's path, or in its host name? botocore decides for `auto`."""
    storage_class: str | None = None
    encryption: str | None = None
    """By the server: `AES256`, `aws:kms`, or `aws:kms:KEY`."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """This machine's place for backups; None where BACKUP_BUCKET is not set. Raises `InvalidInputs`."""
        bucket = os.environ.get("BACKUP_BUCKET")
        return cls._read(bucket, os.environ.get("BACKUP_PREFIX") or "") if bucket else None

    @classmethod
    def at(cls, url: str) -> Self:
        """The place that `s3://bucket/prefix` names, all else from the environment. Raises `InvalidInputs`."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise InvalidInputs(f"{url!r} is no place in a bucket: write s3://bucket/prefix")
        return cls._read(parts.netloc, parts.path)

    @classmethod
    def _read(cls, bucket: str, prefix: str) -> Self:
        given = {
            "bucket": bucket,
            "prefix": prefix.strip("/"),
            "path_style": os.environ.get("BACKUP_PATH_STYLE") or "auto",
            "storage_class": os.environ.get("BACKUP_STORAGE_CLASS") or None,
            "encryption": os.environ.get("BACKUP_ENCRYPTION") or None,
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = "_".join(map(str, first["loc"])).upper()
            raise InvalidInputs(f"BACKUP_{name} = {first['input']!r}: {first['msg']}") from None

    def key(self, run: str, path: str = "") -> str:
        """The object key of a file of a run; without `path` the run's folder, with a slash at the end."""
        return "/".join(part for part in (self.prefix, run, path or "\0") if part).removesuffix("\0")

    def url(self, run: str = "") -> str:
        """The place of a run, or of all runs."""
        return "s3://" + "/".join(part for part in (self.bucket, self.prefix, run) if part)

    def put_options(self) -> dict[str, Any]:
        """What each new object is put with."""
        options: dict[str, Any] = {"StorageClass": self.storage_class} if self.storage_class else {}
        if self.encryption:
            kind, _, key = self.encryption.removeprefix("aws:").partition(":")
            options["ServerSideEncryption"] = f"aws:{kind}" if self.encryption.startswith("aws:") else kind
            options |= {"SSEKMSKeyId": key} if key else {}
        return options


def required() -> BucketSettings:
    """This machine's place for backups. Raises `InvalidInputs` where it has none."""
    if settings := BucketSettings.from_environment():
        return settings
    raise InvalidInputs("BACKUP_BUCKET is not set: name the bucket of the backups (.env.example tells the rest)")
