"""A step's own side of a run that it shares nothing of but the bucket: fetches what it reads, pushes what it makes.

The runs folder of such a machine is a cache: an artifact that has the right digest is not fetched again, another one
at its path is set aside. The folder may be deleted whenever no step runs.
"""

import os
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Manifest, Record, check_files, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs, PrunedArtifact, StepFailed
from steps.common.models import digest_of_model, link_base
from steps.common.rewind import MOMENT
from steps.common.runs import locked
from steps.common.step import clear
from steps.remote.bucket import Bucket
from steps.remote.errors import BackupConflict
from steps.remote.fetch import fetch
from steps.remote.inventory import RemoteArtifact, RemoteRun
from steps.remote.push import push

REQUEST, LOG = ".request", ".log"
Say = Callable[[str], object]


class Wanted(Record):
    """The artifact that a step is to make."""

    path: str
    fingerprint: str
    stale: list[datetime]
    """When those were made that rewinds have set aside there: it is to be made anew, even if it comes out the same."""

    def is_made(self, manifest: Manifest | None) -> bool:
        """Does the manifest tell of it?"""
        return (
            manifest is not None
            and manifest.pruned is None
            and manifest.fingerprint == self.fingerprint
            and manifest.started not in self.stale
        )

    def found(self, remote: RemoteRun) -> RemoteArtifact | None:
        """It, where it is in the bucket and whole."""
        if self.path not in remote.finished():
            return None
        there = remote.artifact(self.path)
        return there if self.is_made(there.manifest) and not there.lacking else None

    def fetch(self, remote: RemoteRun, root: Path) -> None:
        """Has it at `root` where it is in the bucket."""
        if there := self.found(remote):
            fetch(remote, there, root)


class Request(Record):
    """What a step is asked for. It holds secrets, and is deleted when the step has ended."""

    wanted: Wanted
    inputs: str
    """JSON."""
    env: dict[str, str]
    needs: dict[str, str]
    """Digests of the artifacts that it reads, by path."""
    base_digest: str | None
    """Of the base model, where that is in a folder of each machine."""
    owner: str
    """The flow that asks, as those who put objects are named."""

    @classmethod
    def read(cls, bucket: Bucket, run: str, step: str, path: str) -> "Request":
        """Raises `StepFailed` where it is there no more."""
        key = bucket.settings.key(run, letter(step, path, REQUEST))
        if there := bucket.head(key):
            return cls.model_validate_json(bucket.read(there))
        raise StepFailed(f"{bucket.settings.url()} has no {key}: whoever asked for this step has given it up")


def letter(step: str, path: str, kind: str) -> str:
    """Where a step and its flow leave each other what is no artifact, relative to the run's folder."""
    return layout.log(step, path).removesuffix(LOG) + kind


def prepare(bucket: Bucket, root: Path, request: Request, say: Say) -> None:
    """Has at `root` what the step reads, and nothing in its way.

    Raises `InvalidInputs` where this machine lacks the base model, `StepFailed` where the bucket has not what it
    should, `CorruptArtifact`, `RunInUse`, `BucketFault`.
    """
    have(bucket, root, request.needs, say)
    if request.base_digest:
        link_own_base(root, request.base_digest)
    target = root / request.wanted.path
    clear(target)
    if not request.wanted.is_made(read_manifest(target)):
        put_aside(root, request.wanted.path)


def have(bucket: Bucket, root: Path, needs: Mapping[str, str], say: Say) -> None:
    """Has artifacts at `root`, by path and digest. Raises as `prepare` does."""
    missing = {path: digest for path, digest in needs.items() if not is_cached(root / path, digest)}
    if missing:
        with locked(root):
            for path, digest in missing.items():
                _get(RemoteRun(bucket, root.name, path), root, path, digest, say)


def deliver(bucket: Bucket, root: Path, request: Request) -> None:
    """Has what the step made in the bucket; where another attempt was first, that one's stands.

    Raises `BackupConflict` where another run's is there, `CorruptArtifact`, `BucketFault`.
    """
    wanted = request.wanted
    remote = RemoteRun(bucket, root.name, wanted.path)
    if wanted.found(remote):
        return
    try:
        push(remote, root, wanted.path, owner=request.owner)
    except BackupConflict:
        if not wanted.found(RemoteRun(bucket, root.name, wanted.path)):
            raise


def is_cached(folder: Path, digest: str) -> bool:
    """Is the artifact here? One that is damaged is not: it is fetched anew."""
    try:
        manifest = read_manifest(folder)
        if manifest is None or manifest.digest != digest:
            return False
        check_files(folder, manifest)
    except (CorruptArtifact, PrunedArtifact):
        return False
    return True


def put_aside(root: Path, path: str) -> None:
    """Moves what is at a path out of the way."""
    if (root / path).exists():
        aside = root / layout.SUPERSEDED / datetime.now(UTC).strftime(MOMENT) / path
        aside.parent.mkdir(parents=True, exist_ok=True)
        (root / path).rename(aside)


def link_own_base(root: Path, digest: str) -> None:
    """Has `root/base` lead to this machine's copy of the base model. Raises `InvalidInputs` where it has none."""
    given = os.environ.get("NIGHTSCHOOL_BASE_MODEL")
    if not given:
        raise InvalidInputs(
            f"NIGHTSCHOOL_BASE_MODEL is not set on {platform.node()}: name the base model's folder there"
        )
    folder = Path(given).expanduser()
    if not folder.is_dir() or digest_of_model(folder) != digest:
        raise InvalidInputs(
            f"{folder} on {platform.node()} does not hold the run's base model (digest {digest[:12]}): copy the folder "
            f"that model.base names there, or point NIGHTSCHOOL_BASE_MODEL to it"
        )
    link_base(root, folder, digest)


def _get(remote: RemoteRun, root: Path, path: str, digest: str, say: Say) -> None:
    put_aside(root, path)
    there = remote.artifact(path) if path in remote.finished() else None
    if there is None or there.manifest.digest != digest:
        raise StepFailed(f"{remote.url}/{path} is not there, or is another by now: was the run changed meanwhile?")
    fetch(remote, there, root)
    say(f"fetched {path}: {there.bytes:,} bytes")
