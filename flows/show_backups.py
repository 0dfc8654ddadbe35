"""What is in the bucket, on the terminal."""

from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steps.common.runs import runs_folder
from steps.remote.bucket import Bucket
from steps.remote.compare import differences, remote_damages
from steps.remote.inventory import RemoteRun, no_such_run, runs_in
from steps.remote.settings import required

console = Console()


def print_remote_runs(bucket: Bucket) -> None:
    """A row a run: finished artifacts, what is not finished, size, when anything changed last."""
    table = Table("run", "artifacts", "unfinished", "bytes", "last change (UTC)", box=None, header_style="bold")
    names = runs_in(bucket)
    for name in names:
        remote = RemoteRun(bucket, name)
        loose = len(list(remote.unfinished())) + len(remote.uploads())
        size = sum(found.bytes for found in remote.objects.values())
        changed = max((found.modified for found in remote.objects.values()), default=None)
        table.add_row(escape(name), str(len(remote.finished())), str(loose), f"{size:,}", _when(changed))
    console.print(table if names else f"there are no runs in {bucket.settings.url()}")


def print_remote_run(bucket: Bucket, name: str) -> None:
    """A row an artifact, and one for what belongs to none. Raises `InvalidInputs` where there is no such run."""
    remote = RemoteRun(bucket, name)
    if not remote.objects:
        raise no_such_run(bucket, name)
    table = Table("path", "is", "files", "bytes", "changed (UTC)", box=None, header_style="bold")
    rows = [
        (
            a.path,
            "whole" if not a.lacking else f"lacks {len(a.lacking)} files",
            len(a.manifest.files),
            a.bytes,
            a.modified,
        )
        for a in remote.artifacts()
    ]
    loose = [(left.path, "without a manifest", left.files, left.bytes, left.modified) for left in remote.unfinished()]
    uploads = [(left.path, "half uploaded", 1, left.bytes, left.active) for left in remote.uploads()]
    for path, state, files, size, when in [*rows, *loose, *uploads]:
        table.add_row(escape(path), state, str(files), f"{size:,}", _when(when))
    console.print(table)
    whole = sum(state == "whole" for _, state, *_ in rows)
    total = sum(found.bytes for found in remote.objects.values()) + sum(size for *_, size, _ in uploads)
    console.print(
        f"{whole} of {len(rows)} artifacts are whole, {len(loose) + len(uploads)} unfinished; {total:,} bytes"
    )


def verify_remote(name: str, deep: bool) -> list[str | None]:
    """What is wrong with each artifact of a run's backup, and what of the run here is not in it.

    Raises `InvalidInputs` where there is no such run in the bucket.
    """
    remote = RemoteRun(Bucket(required()), Path(name).name)
    if not remote.objects:
        raise no_such_run(remote.bucket, name)
    found = [damage for _, damage in remote_damages(remote, deep)]
    here = runs_folder() / name
    return found + list(differences(remote, here) if here.is_dir() else [])


def _when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}" if moment else "-"
