"""The command that makes room."""

from typing import Annotated

import typer

from flows.cli.arguments import RunName

app = typer.Typer()


@app.command()
def prune(
    run: RunName,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would go, and delete nothing.")] = False,
    remote: Annotated[bool, typer.Option("--remote", help="In the bucket, by [retention.remote].")] = False,
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A rule on top, like retention.last=3.")
    ] = None,
) -> None:
    """Delete what the run's [retention] lets go: checkpoints, rollouts and batches, what rewinds have set aside.

    The newest checkpoint, the champion and its predecessor always stay, and so does what is not backed up where
    BACKUP_BUCKET is set.
    """
    from contextlib import nullcontext

    from flows.config import recorded_config
    from steps.common.runs import find_run, locked

    root = find_run(run)
    policy = recorded_config(root, set or []).retention
    with nullcontext() if dry_run else locked(root):
        if remote:
            from steps.remote.prune import prune_remote

            prune_remote(root, policy.remote, typer.echo, dry_run)
        else:
            from steps.prune import backed_up
            from steps.prune import prune as make_room

            make_room(root, policy, backed_up(root), typer.echo, dry_run)
