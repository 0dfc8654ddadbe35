"""Step `prune`: deletes what the policy lets go, to make room. Nothing else in a run ever deletes what was finished.

A manifest stays, and says that its files are gone: the run goes on past it, and a restore brings the files back. That
is written first, so that a prune which is killed never leaves an artifact that looks whole, and the next one ends it.
Only files that a manifest names are deleted; links are not followed. What a rewind set aside goes with its manifests,
for it must not come back without files; the record of the rewind stays.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Manifest, read_manifest
from steps.common.receipts import ever_sent
from steps.common.retention import BackedUp, Policy, Verdict, artifacts_aside, judge, unfinished_aside
from steps.common.runs import locked
from steps.common.step import exit_status_of
from steps.common.storage import sync, write_atomically
from steps.remote.settings import BucketSettings


def prune(
    root: Path, policy: Policy, backed_up: BackedUp | None, say: Callable[[str], object], dry_run: bool
) -> list[Verdict]:
    """Deletes what `policy` lets go, where it is no `dry_run`; tells of every folder first, and returns all verdicts.

    Call it with the run's lock. Raises `CorruptArtifact` before anything is deleted.
    """
    now = datetime.now(UTC)
    verdicts = judge(root, policy, now, backed_up)
    for verdict in verdicts:
        say(line_of(verdict))
        if verdict.goes and not dry_run:
            _delete(root, verdict.path, now)
    say(total_of(verdicts, dry_run))
    return verdicts


def backed_up(root: Path) -> BackedUp | None:
    """What this machine's backup holds of the run, None where it has none. Raises `CorruptArtifact`."""
    bucket = BucketSettings.from_environment()
    return ever_sent(root, bucket.url(root.resolve().name)) if bucket else None


def line_of(verdict: Verdict) -> str:
    """A folder's fate, on a line."""
    return f"{'goes ' if verdict.goes else 'stays'}  {verdict.path:<32}  {size(verdict.bytes):>8}  {verdict.reason}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def total_of(verdicts: list[Verdict], dry_run: bool) -> str:
    """The closing line."""
    goes = [verdict for verdict in verdicts if verdict.goes]
    if not goes:
        return "nothing to prune"
    freed = size(sum(verdict.bytes for verdict in goes))
    return f"{len(goes)} folders {'would be' if dry_run else 'were'} pruned, {freed} in all"


def _delete(root: Path, path: str, now: datetime) -> None:
    if path.startswith(f"{layout.SUPERSEDED}/"):
        _delete_aside(root / path)
    elif manifest := read_manifest(root / path):
        if not manifest.pruned:
            marked = manifest.model_copy(update={"pruned": now})
            write_atomically(root / path / layout.MANIFEST, marked.model_dump_json(indent=1).encode())
        _delete_files(root / path, manifest)


def _delete_files(folder: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        (folder / name).unlink(missing_ok=True)
    within = {parent for name in manifest.files for parent in Path(name).parents if parent != Path()}
    for parent in sorted(within, key=lambda parent: len(parent.parts), reverse=True):
        with suppress(OSError):  # it is gone already, or others have put something there
            (folder / parent).rmdir()


def _delete_aside(aside: Path) -> None:
    """What a rewind has set aside, but for its record. A folder is hidden first: it must not come back half-empty."""
    for path in artifacts_aside(aside):
        folder = aside / path
        folder.rename(folder.with_name(f".{folder.name}{layout.PARTIAL}"))
        sync(folder.parent)
    for folder in unfinished_aside(aside):
        shutil.rmtree(folder)
    for folder in sorted(aside.rglob("*"), reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def main() -> None:
    """Runs as a command: `python -m steps.prune --root runs/demo --policy policy.json [--dry-run]`."""
    parser = argparse.ArgumentParser(prog="python -m steps.prune", description="Deletes what a policy lets go.")
    parser.add_argument("--root", type=Path, required=True, help="the run's folder")
    parser.add_argument("--policy", type=Path, required=True, help="a JSON file")
    parser.add_argument("--dry-run", action="store_true", help="only tell")
    given = parser.parse_args()
    policy = Policy.model_validate_json(given.policy.read_text())
    with locked(given.root):
        prune(given.root, policy, backed_up(given.root), print, given.dry_run)


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
