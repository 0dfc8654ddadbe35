"""Backs a run up: every finished artifact that is not in the bucket yet, then the run's small files.

    python -m steps.backup --root runs/demo

A backup that sent something leaves a receipt, which travels as well. It may be killed at any moment, and be repeated:
files that have arrived are not sent again. What a rewind replaced is set aside in the bucket too, with all that was
made from it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from steps.common import layout
from steps.common.artifacts import Manifest
from steps.common.backups import note_failure, note_success
from steps.common.errors import InvalidInputs
from steps.common.receipts import (
    BACKUPS,
    RECEIPT,
    Backup,
    BackupInputs,
    Sent,
    ever_sent,
    finished,
    next_path,
    sent,
    written,
)
from steps.common.runs import locked
from steps.common.step import Step, Workspace, exit_status_of
from steps.common.storage import write_atomically
from steps.remote.settings import BucketSettings, required

if TYPE_CHECKING:
    from steps.remote.inventory import RemoteRun

Say = Callable[[str], object]


def backup(root: Path, settings: BucketSettings, say: Say = print) -> Backup | None:
    """Has all that is finished of the run at `root` in the bucket; returns the receipt, None where nothing was new.

    Call it while no other backs this folder up: under the run's lock. Raises `BackupConflict` where another machine
    backs up the same run, `CorruptArtifact` where a file here or there is damaged, `BucketFault`, `InvalidInputs`;
    whatever it raises is counted as a failure.
    """
    try:
        receipt = _back_up(root, settings, say)
    except Exception as error:
        note_failure(root, str(error))
        raise
    note_success(root)
    return receipt


def _back_up(root: Path, settings: BucketSettings, say: Say) -> Backup | None:
    from steps.remote.bucket import Bucket
    from steps.remote.inventory import RemoteRun
    from steps.remote.push import push

    remote = RemoteRun(Bucket(settings), root.name)
    for upload in remote.clear_uploads():
        say(f"deleted {upload.bytes:,} bytes of {upload.path} in {remote.url}, whose upload was given up")
    receipt = None
    if new := missing(root, remote):
        for path in _set_followers_aside(root, remote, new):
            say(f"set {path} aside in {remote.url}: it was made from what is another now")
        step = Step("backup", BackupInputs, Backup, partial(_send, remote, say))
        inputs = BackupInputs(to=remote.url, holds={path: Sent.of(manifest) for path, manifest in new.items()})
        receipt = step.run(inputs, root, next_path(root))
    for path, manifest in written(root):
        if not _is_there(remote, path, manifest):
            push(remote, root, path)
    for path, manifest in finished(root):
        if manifest.pruned and not remote.is_pruned(path) and f"{path}/{layout.MANIFEST}" not in remote.objects:
            remote.note_pruned(path, manifest)  # pruned before it was ever backed up
    _send_plain_files(root, remote)
    return receipt


def missing(root: Path, remote: "RemoteRun") -> dict[str, Manifest]:
    """Artifacts that no receipt covers, or that the bucket has lost, by path."""
    covered = sent(root, remote.url)
    return {
        path: manifest
        for path, manifest in finished(root)
        if not manifest.pruned
        and (
            covered.get(path) != Sent.of(manifest) or not (remote.is_pruned(path) or _is_there(remote, path, manifest))
        )
    }


def _set_followers_aside(root: Path, remote: "RemoteRun", new: Mapping[str, Manifest]) -> Iterator[str]:
    """Where something of ours is to be replaced, sets aside first what is not here any more; gives the paths.

    After a rewind, or a restore to an iteration, that is what was made from it. A run restored from both would not fit.
    """
    from steps.remote.push import set_aside

    ours, there = ever_sent(root, remote.url), remote.finished()
    replaced = [
        artifact
        for artifact in map(remote.artifact, sorted(new.keys() & set(there)))
        if Sent.of(artifact.manifest) != Sent.of(new[artifact.path])
    ]
    if not replaced or any((artifact.path, artifact.manifest.digest) not in ours for artifact in replaced):
        return
    here = {path for path, _ in finished(root)}
    for path in there:
        if path not in here and path.partition("/")[0] not in (layout.SUPERSEDED, BACKUPS):
            artifact = remote.artifact(path)
            if (path, artifact.manifest.digest) in ours:
                set_aside(remote, artifact)
                yield path


def _send(remote: "RemoteRun", say: Say, inputs: BackupInputs, workspace: Workspace) -> dict[str, Any]:
    """Sends artifacts, and leaves the receipt."""
    from steps.remote.push import push

    ours, total = ever_sent(workspace.root, inputs.to), 0
    for number, (path, expected) in enumerate(inputs.holds.items(), 1):
        manifest = push(remote, workspace.root, path, ours)
        if Sent.of(manifest) != expected:
            raise InvalidInputs(f"{workspace.root / path} was replaced while it was backed up: run the same again")
        size = sum(entry.bytes for entry in manifest.files.values())
        say(f"backed up {path}: {size:,} bytes ({number}/{len(inputs.holds)})")
        total += size
    write_atomically(workspace.out / RECEIPT, inputs.model_dump_json(indent=1).encode())
    return {"to": inputs.to, "artifacts": len(inputs.holds), "bytes": total}


def _is_there(remote: "RemoteRun", path: str, manifest: Manifest) -> bool:
    return f"{path}/{layout.MANIFEST}" in remote.objects and not remote.lacking(path, manifest)


def _send_plain_files(root: Path, remote: "RemoteRun") -> None:
    """The small files that are no artifacts, `run.json` last. A judge's answer is named by its request: sent once."""
    from steps.remote.inventory import is_plain
    from steps.remote.upload import overwrite

    found = (*root.iterdir(), *root.glob("nights/*"), *root.glob(f"{layout.JUDGE}/*"))
    files = [file.relative_to(root).as_posix() for file in found if file.is_file() and not file.name.startswith(".")]
    for path in sorted(files, key=lambda path: (path == layout.RUN, path)):
        if is_plain(path) and not (path.startswith(f"{layout.JUDGE}/") and path in remote.objects):
            overwrite(remote.bucket, remote.key(path), (root / path).read_bytes())


def main(arguments: list[str] | None = None) -> Never:
    """Runs as a command, with the step contract's exit status."""
    parser = argparse.ArgumentParser(prog="python -m steps.backup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the run's folder")
    given = parser.parse_args(arguments)

    def work() -> None:
        settings = required()
        with locked(given.root):
            backup(given.root, settings)

    sys.exit(exit_status_of(work))


if __name__ == "__main__":
    main()
