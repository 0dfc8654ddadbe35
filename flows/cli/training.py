"""Commands that train, evaluate, and go back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.arguments import RunName

if TYPE_CHECKING:
    from steps.evaluate_model import ModelServer

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
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run's name, or its folder.")] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="The checkpoint's number; without it the newest that is finished.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="In place of RUN: an environment's name, or a run's settings, TOML."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Another model: its name at a server, base, or RUN@7 of another run."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server, with OpenAI's API; without it OpenAI's own.")
    ] = None,
    key_variable: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable with its key; without it OPENAI_API_KEY, for OpenAI only."),
    ] = None,
    prices: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="READ WRITTEN", help="Of a million tokens, to be told what it cost."),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting on top, like evaluate.tasks=64.")
    ] = None,
) -> None:
    """Play held-out tasks: with a checkpoint of a run, or with any other model, to compare it."""
    from flows.command import evaluate_with_server

    evaluate_with_server(run, env, iteration, model, _server(base_url, key_variable, prices), set or [])


def _server(base_url: str | None, key_variable: str | None, prices: tuple[float, float] | None) -> "ModelServer | None":
    """Where a model is asked; None where nothing is said of that. Raises `InvalidInputs`."""
    from pydantic import ValidationError

    from flows.config import explain
    from steps.common.errors import InvalidInputs
    from steps.evaluate_model import ModelServer

    given: dict[str, object] = {"base_url": base_url, "key_variable": key_variable}
    given |= {"prices": prices and {"prompt": prices[0], "completion": prices[1]}}
    if not any(given.values()):
        return None
    try:
        return ModelServer.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise InvalidInputs("; ".join(explain(ModelServer, error))) from None


@app.command()
def rewind(
    run: RunName,
    iteration: Annotated[int, typer.Option(min=0, help="The iteration to go back to.")],
    step: Annotated[
        Literal["pretrain", "demonstrations", "initialize", "sft", "rollout", "group", "collate", "train", "evaluate"],
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
