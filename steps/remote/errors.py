"""What went wrong with a bucket, in one line that holds no secret: codes are passed on, a server's own words never."""

from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)

from steps.common.errors import InvalidInputs, NightschoolError
from steps.remote.settings import BucketSettings

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
REFUSED = {"AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccountProblem", "403"}
OTHER_BYTES = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
OCCUPIED = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchUpload", "412", "409"}
"""NoSuchUpload: the answer to a completion was lost, and it was asked for again; or another cleared the upload."""
ABSENT = {"NoSuchKey", "NotFound", "404"}


class BucketFault(NightschoolError):
    """The bucket does not answer as it should, after all retries: try again once it does."""


class BackupConflict(InvalidInputs):
    """The bucket holds another artifact at that path, which this run did not put there."""


class Occupied(Exception):
    """A conditional write met an object. Whoever writes says what that means."""


class Absent(Exception):
    """There is no such object. Whoever reads says what that means."""


def code_of(error: Exception) -> str:
    """The server's code; empty where it did not answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def explained(error: ClientError | BotoCoreError, settings: BucketSettings, endpoint: str) -> Exception:
    """The error to raise instead."""
    code, place = code_of(error), f"{settings.url()} at {_host(endpoint)}"
    if code in OCCUPIED:
        return Occupied()
    if code in ABSENT:
        return Absent()
    if code == "NoSuchBucket":
        return InvalidInputs(f"there is no bucket {settings.bucket} at {_host(endpoint)}: make it, or name another")
    if code in REFUSED:
        return InvalidInputs(f"{place} refuses these credentials ({code}): check AWS_ACCESS_KEY_ID and its rights")
    if code in EXPIRED:
        return BucketFault(f"the credentials for {place} have expired: renew them, and the same command goes on")
    if code in OTHER_BYTES:
        return BucketFault(f"{place} received other bytes than were sent ({code}): try again, and check the network")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return InvalidInputs(f"there are no credentials for {place}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, ParamValidationError):
        return InvalidInputs(f"{settings.bucket!r} can't be the name of a bucket")
    return BucketFault(f"{place} does not work ({code or type(error).__name__}): the same command goes on once it does")


def _host(endpoint: str) -> str:
    """Without a user and password that may be in it."""
    parts = urlsplit(endpoint)
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
