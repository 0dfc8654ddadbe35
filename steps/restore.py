"""Rebuilds a run from a bucket, by the manifests there alone, or brings back what is missing of one.

    python -m steps.restore --root runs/demo --from s3://bucket/prefix

Each file is verified as it arrives; a folder appears when it is whole, and `run.json` when all is. It may be killed at
any moment, and be repeated. It makes no bucket, and changes nothing there.
"""

import argparse
import errno
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Never

from steps.common import layout
from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs, NightschoolError
from steps.common.runs import locked
from steps.common.step import exit_status_of
from steps.common.storage import write_atomically
from steps.remote.settings import BucketSettings, required

if TYPE_CHECKING:
    from steps.remote.inventory import RemoteRun

Say = Callable[[str], object]
Only = Literal["checkpoints"]


class Restored(Record):
    """What a restore brought back."""

    origin: str
    """s3://bucket/prefix/run."""
    artifacts: int
    bytes: int
    here: int
    """Artifacts that were there already."""


def restore(
    settings: BucketSettings,
    run: str,
    root: Path,
    iteration: int | None = None,
    only: Only | None = None,
    say: Say = print,
    dry: bool = False,
) -> Restored:
    """Has a run of the bucket at `root`, and returns what that took.

    Args:
        settings: Where backups are.
        run: The run's name there.
        root: The run's folder here.
        iteration: To this checkpoint, and what training needs to go on from it; None for all there is.
        only: Checkpoints, and a base model that the run made: enough to serve, not to go on training.
        say: Takes a line for each artifact.
        dry: Only says what it would bring, and changes nothing.

    Raises `InvalidInputs` where there is no such run or checkpoint, or another artifact at a path here,
    `CorruptArtifact` where something there or here is damaged, `RunInUse`, `BucketFault`, and `NightschoolError` where
    the disk is too small.
    """
    from steps.remote.bucket import Bucket
    from steps.remote.inventory import RemoteRun, no_such_run

    bucket = Bucket(settings)
    remote = RemoteRun(bucket, run)
    if not remote.objects:
        raise no_such_run(bucket, run)
    _check(remote, iteration)
    if dry:
        return _restore(remote, root, iteration, only, say, dry)
    with locked(root):
        return _restore(remote, root, iteration, only, say, dry)


def _restore(
    remote: "RemoteRun", root: Path, iteration: int | None, only: Only | None, say: Say, dry: bool
) -> Restored:
    from steps.remote.bucket import side_by_side
    from steps.remote.fetch import fetch, fetch_pruned, free_space, is_here, lacking
    from steps.remote.inventory import is_plain

    artifacts = list(side_by_side(remote.artifact, _chosen(remote.finished(), iteration, only)))
    if broken := [artifact for artifact in artifacts if artifact.lacking]:
        raise InvalidInputs(lacking(remote, broken[0]))
    wanted = [artifact for artifact in artifacts if not is_here(root, artifact, remote.url)]
    total = sum(artifact.bytes for artifact in wanted)
    restored = Restored(origin=remote.url, artifacts=len(wanted), bytes=total, here=len(artifacts) - len(wanted))
    if dry:
        for artifact in wanted:
            say(f"{artifact.path}: {artifact.bytes:,} bytes")
        return restored
    if (free := free_space(root)) < total:
        raise NightschoolError(f"{root} needs {total:,} bytes, and its disk has {free:,}: free some, then try again")
    try:
        for number, artifact in enumerate(wanted, 1):
            fetch(remote, artifact, root)
            say(f"restored {artifact.path}: {artifact.bytes:,} bytes ({number}/{len(wanted)})")
        for path in _chosen(remote.pruned(), iteration, only):
            fetch_pruned(remote, path, root)
        for path in sorted(filter(is_plain, remote.objects), key=lambda path: (path == layout.RUN, path)):
            if not (root / path).exists():
                write_atomically(root / path, remote.plain(path))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NightschoolError(f"the disk of {root} is full: free some; the same command then goes on") from None
    return restored


def _check(remote: "RemoteRun", iteration: int | None) -> None:
    """Raises `InvalidInputs` where the checkpoint asked for is not there."""
    if iteration is not None and layout.checkpoint(iteration) not in remote.finished():
        there = [path.rpartition("/")[2] for path in remote.finished() if path.startswith("checkpoints/")]
        raise InvalidInputs(f"{remote.url} has no checkpoint {iteration}: there are {', '.join(there) or 'none'}")


def _chosen(paths: Iterable[str], iteration: int | None, only: Only | None) -> list[str]:
    """Those of the paths that are to come."""
    return [
        path
        for path in paths
        if not path.startswith(f"{layout.SUPERSEDED}/")
        and (only is None or path == layout.MODEL or path.startswith("checkpoints/"))
        and (iteration is None or _is_needed(path, iteration))
    ]


def _is_needed(path: str, iteration: int) -> bool:
    """Is the artifact there when checkpoint `iteration` is the newest, and evaluated?"""
    if found := re.match(r"(checkpoints|evaluations|iterations)/(\d+)", path):
        return int(found[2]) < iteration + (found[1] != "iterations")
    return True


def main(arguments: list[str] | None = None) -> Never:
    """Runs as a command, with the step contract's exit status."""
    parser = argparse.ArgumentParser(prog="python -m steps.restore", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the run's folder, named like the run in the bucket")
    parser.add_argument("--iteration", type=int, help="to this checkpoint (default: all there is)")
    parser.add_argument("--only", choices=["checkpoints"], help="nothing else")
    parser.add_argument("--from", dest="origin", help="s3://bucket/prefix (default: BACKUP_BUCKET and BACKUP_PREFIX)")
    given = parser.parse_args(arguments)

    def work() -> None:
        settings = BucketSettings.at(given.origin) if given.origin else required()
        restore(settings, given.root.name, given.root, given.iteration, given.only)

    sys.exit(exit_status_of(work))


if __name__ == "__main__":
    main()
