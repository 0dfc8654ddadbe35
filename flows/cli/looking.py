"""Commands that look at a run and change nothing."""

from typing import Annotated

import typer

from flows.cli.arguments import RunName

app = typer.Typer()


@app.command()
def status(
    run: RunName, json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False
) -> None:
    """Show where a run stands."""
    from steps.common.runs import find_run
    from steps.common.status import status_of

    standing = status_of(find_run(run))
    if json:
        typer.echo(standing.model_dump_json(indent=1))
    else:
        from flows.status import print_status

        print_status(standing)


@app.command()
def show(
    run: RunName,
    trajectory: Annotated[
        str | None,
        typer.Option(metavar="ID", help="0003/task/attempt; of evaluations test-0003/task/0 or test-MODEL/task/0."),
    ] = None,
) -> None:
    """List the newest trajectories, or read one: the transcript with tokens and rewards."""
    from flows.show import print_trajectories, print_trajectory
    from steps.common.runs import find_run

    if trajectory:
        print_trajectory(find_run(run), trajectory)
    else:
        print_trajectories(find_run(run))


@app.command()
def sql(run: RunName, query: Annotated[str, typer.Argument(metavar="SQL")]) -> None:
    """Query a run: the tables trajectories, groups, judgements, batch, evaluations, checkpoints."""
    from flows.show import print_table
    from steps.common.query import select
    from steps.common.runs import find_run
    from steps.common.status import pruned

    root = find_run(run)
    print_table(select(root, query))
    gone = pruned(root)
    for table, part in (("trajectories", "/rollouts/"), ("batch", "/batch")):
        if iterations := {path.split("/")[1] for path in gone if part in path}:
            typer.echo(f"{table} lacks rows of {len(iterations)} iterations: they were pruned", err=True)


@app.command()
def verify(
    run: RunName,
    remote: Annotated[
        bool, typer.Option("--remote", help="The backup: sizes and sums as the bucket knows them.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="With --remote: read every file in the bucket.")] = False,
) -> None:
    """Read every file of a run and compare it with its manifest; or do that to its backup."""
    from steps.common.errors import InvalidInputs
    from steps.common.runs import find_run
    from steps.common.status import damages

    if deep and not remote:
        raise InvalidInputs("--deep goes with --remote: the files here are always read")
    if remote:
        from flows.show_backups import verify_remote

        found = verify_remote(run, deep)
    else:
        found = [damage for _, damage in damages(find_run(run))]
    wrong = [damage for damage in found if damage]
    for damage in wrong:
        typer.echo(damage, err=True)
    typer.echo(f"{len(found) - len(wrong)} of {len(found)} artifacts are whole")
    if wrong:
        raise typer.Exit(1)
