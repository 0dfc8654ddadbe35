"""Commands that train, evaluate, and go back."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.arguments import RunName

app = typer.Typer()


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
def evaluate(
    run: RunName,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="The checkpoint's number; without it the newest that is finished.")
    ] = None,
) -> None:
    """Play a run's held-out tasks with one of its checkpoints, by the settings it was last trained with."""
    from flows.command import evaluate_with_server

    evaluate_with_server(run, iteration)


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
