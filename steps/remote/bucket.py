"""An S3 client that explains its errors, waits for nothing for ever, and takes fresh credentials when some expire.

botocore retries what is throttled, broken or unreachable, with backoff. What it does not retry is a body that ends
early, and credentials that ran out.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from steps.common.artifacts import Record
from steps.remote.errors import EXPIRED, Absent, code_of, explained
from steps.remote.settings import BucketSettings

ATTEMPTS = 6
"""Of each request."""
CONNECT, READ = 10.0, 60.0
"""Seconds without progress, after which a request is tried again."""
AT_ONCE = 4
"""Requests at the same time."""
MOST_AT_ONCE = 5 << 30
"""Bytes that S3 copies in one request."""
PART = 16 << 20
"""Bytes of a large file that travel in one request."""
ENDED_EARLY = (ResponseStreamingError, IncompleteReadError, FlexibleChecksumError)
"""A body was cut off, or its checksum says that it came otherwise than it was sent: botocore leaves that to us."""

T = TypeVar("T")
S = TypeVar("S")


class Object(Record):
    """An object as a listing knows it."""

    key: str
    bytes: int
    etag: str
    modified: datetime


class Head(Object):
    """An object with what was noted when it was put."""

    metadata: dict[str, str]


class Bucket:
    """All requests go through `call`, which raises one-line errors, `Occupied` or `Absent`."""

    def __init__(self, settings: BucketSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._client = self._connect()

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """One request, like `call("head_object", Key=…)`."""
        return self._attempt(lambda client: getattr(client, operation)(Bucket=self.settings.bucket, **parameters))

    def list(self, prefix: str) -> Iterator[Object]:
        """Every object under a prefix, in the order of keys."""
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=prefix, **more)
            for found in page.get("Contents", []):
                yield Object(key=found["Key"], bytes=found["Size"], etag=found["ETag"], modified=found["LastModified"])
            if not page["IsTruncated"]:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def folders(self, prefix: str) -> Iterator[str]:
        """Names of the folders right below a prefix."""
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            for found in page.get("CommonPrefixes", []):
                yield found["Prefix"].removeprefix(prefix).strip("/")
            if not page["IsTruncated"]:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def head(self, key: str) -> Head | None:
        """What is known of an object, or None where there is none."""
        try:
            found = self.call("head_object", Key=key)
        except Absent:
            return None
        return Head(
            key=key,
            bytes=found["ContentLength"],
            etag=found["ETag"],
            modified=found["LastModified"],
            metadata=found["Metadata"],
        )

    def read(self, found: Object, first: int = 0, size: int | None = None) -> bytes:
        """An object's bytes, or `size` of them from `first` on.

        Raises `Absent` where it is gone, `Occupied` where another took its place.
        """
        span = {} if size is None else {"Range": f"bytes={first}-{first + size - 1}"}

        def get(client: Any) -> bytes:
            answer = client.get_object(Bucket=self.settings.bucket, Key=found.key, IfMatch=found.etag, **span)
            try:
                body: bytes = answer["Body"].read()
            except ReadTimeoutError as error:  # unlike one before the answer began, botocore has not tried it again
                raise ResponseStreamingError(error=error) from None
            return body

        return self._attempt(get)

    def copy(self, key: str, to: str) -> None:
        """Copies an object within the bucket, with what was noted when it was put. Raises `Absent`."""
        found = self.head(key)
        if found is None:
            raise Absent
        options = self.settings.put_options() | {"Metadata": found.metadata, "MetadataDirective": "REPLACE"}
        source, bucket = {"Bucket": self.settings.bucket, "Key": key}, self.settings.bucket
        whole = TransferConfig(multipart_threshold=MOST_AT_ONCE)
        self._attempt(lambda client: client.copy(source, bucket, to, ExtraArgs=options, Config=whole))

    def delete(self, key: str) -> None:
        """Deletes an object, where it is there."""
        self.call("delete_object", Key=key)

    def _attempt(self, work: Callable[[Any], T]) -> T:
        renewed, broken = False, 0
        while True:
            client = self._client
            try:
                return work(client)
            except ENDED_EARLY as error:
                broken += 1
                if broken == ATTEMPTS:
                    raise explained(error, self.settings, client.meta.endpoint_url) from None
                time.sleep(random.uniform(0.5, 1) * 2 ** (broken - 1))
            except (ClientError, BotoCoreError) as error:
                # The answer to HEAD has no body that would say why.
                if renewed or code_of(error) not in EXPIRED | {"400", "403"}:
                    raise explained(error, self.settings, client.meta.endpoint_url) from None
                renewed = True
                self._renew(client)

    def _renew(self, client: Any) -> None:
        with self._lock:
            if self._client is client:
                self._client = self._connect()

    def _connect(self) -> Any:
        """A client of a session of its own: credentials are looked for anew."""
        config = Config(
            connect_timeout=CONNECT,
            read_timeout=READ,
            max_pool_connections=2 * AT_ONCE,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            s3={"addressing_style": self.settings.path_style},
        )
        try:
            return boto3.session.Session().client("s3", config=config)
        except BotoCoreError as error:
            raise explained(error, self.settings, "") from None


def side_by_side(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Results in the order of `items`, of which no more are taken than are worked on at the same time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ahead: deque[Future[T]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) > AT_ONCE:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
