"""Gets of a run in a bucket what a fork starts from: one checkpoint, and the base model where the run made it."""

from pathlib import Path

from steps.common import layout
from steps.common.errors import InvalidInputs
from steps.common.storage import write_atomically
from steps.remote.bucket import Bucket
from steps.remote.fetch import fetch, is_here
from steps.remote.inventory import RemoteRun, no_such_run
from steps.remote.settings import BucketSettings


def fetch_origin(settings: BucketSettings, run: str, iteration: int, folder: Path) -> str:
    """Has it in `folder`, laid out like the run's, and returns the run's address.

    Raises `InvalidInputs` where there is no such run or checkpoint, `CorruptArtifact`, `BucketFault`.
    """
    bucket = Bucket(settings)
    remote = RemoteRun(bucket, run)
    if layout.RUN not in remote.objects:
        raise no_such_run(bucket, run)
    path = layout.checkpoint(iteration)
    if path not in remote.finished():
        there = [path.rpartition("/")[2] for path in remote.finished() if path.startswith("checkpoints/")]
        raise InvalidInputs(f"{remote.url} has no checkpoint {iteration}: there are {', '.join(there) or 'none'}")
    checkpoint = remote.artifact(path)
    own = checkpoint.manifest.artifact["base_model"] == layout.MODEL
    for artifact in (checkpoint, *([remote.artifact(layout.MODEL)] if own else [])):
        if not is_here(folder, artifact, remote.url):
            fetch(remote, artifact, folder)
    write_atomically(folder / layout.RUN, remote.plain(layout.RUN))
    return remote.url
