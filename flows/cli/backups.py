"""Commands that move runs off this machine and back."""

from typing import Annotated, Literal

import typer

from flows.cli.arguments import RunName

app = typer.Typer()
Origin = Annotated[
    str | None, typer.Option("--from", metavar="URL", help="s3://bucket/prefix; else BACKUP_BUCKET and BACKUP_PREFIX.")
]


@app.command()
def backup(run: RunName) -> None:
    """Send what is finished of a run to the bucket. Again: what is not there yet."""
    from steps.backup import backup as send
    from steps.common.runs import find_run, locked
    from steps.remote.settings import required

    settings, root = required(), find_run(run)
    with locked(root):
        receipt = send(root, settings, typer.echo)
    typer.echo(f"sent {receipt.artifacts} artifacts to {receipt.to}" if receipt else "nothing was new")


@app.command()
def restore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    iteration: Annotated[
        str, typer.Option(metavar="N|latest", help="To this checkpoint, so that training goes on from it.")
    ] = "latest",
    origin: Origin = None,
    only: Annotated[Literal["checkpoints"] | None, typer.Option(help="Nothing else: enough to serve.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would come.")] = False,
) -> None:
    """Rebuild a run from its backup, or bring back what is missing of it. Interrupted, the same command goes on."""
    from steps.common.errors import InvalidInputs
    from steps.common.runs import runs_folder
    from steps.remote.settings import BucketSettings, required
    from steps.restore import restore as bring_back

    if iteration != "latest" and not iteration.isdigit():
        raise InvalidInputs(f"--iteration {iteration}: give a checkpoint's number, or latest")
    settings = BucketSettings.at(origin) if origin else required()
    number = None if iteration == "latest" else int(iteration)
    done = bring_back(settings, run, runs_folder() / run, number, only, typer.echo, dry_run)
    verb = "would bring" if dry_run else "brought"
    typer.echo(f"{verb} {done.artifacts} artifacts, {done.bytes:,} bytes, from {done.origin}; {done.here} were here")


@app.command()
def backups(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's name; else all runs are listed.")] = None,
    origin: Origin = None,
) -> None:
    """List what is in the bucket: runs, or the artifacts of one, complete or not."""
    from flows.show_backups import print_remote_run, print_remote_runs
    from steps.remote.bucket import Bucket
    from steps.remote.settings import BucketSettings, required

    bucket = Bucket(BucketSettings.at(origin) if origin else required())
    if run is None:
        print_remote_runs(bucket)
    else:
        print_remote_run(bucket, run)
