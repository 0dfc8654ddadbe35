"""Commands that take a checkpoint elsewhere."""

from typing import Annotated

import typer

from flows.cli.arguments import RunName

app = typer.Typer()


@app.command()
def fork(
    run: RunName,
    new: Annotated[str, typer.Argument(metavar="NEW_RUN", help="The new run's name.")],
    iteration: Annotated[int, typer.Option(min=0, help="The checkpoint to start from.")],
    without_optimizer: Annotated[
        bool, typer.Option("--without-optimizer", help="Take the adapter only: the optimizer starts anew.")
    ] = False,
) -> None:
    """Start a new run from a checkpoint of another."""
    from flows.checkpoints import iteration_of
    from steps.common.runs import find_run
    from steps.fork import ForkInputs, make_run

    root = find_run(run)
    inputs = ForkInputs(
        run=root.name,
        iteration=iteration_of(root, iteration),
        with_optimizer=not without_optimizer,
        source=str(root),
        folder=root,
    )
    typer.echo(f"{make_run(inputs, new)} starts from checkpoint {iteration} of {root.name}: train it with")
    typer.echo(f"  nightschool train CONFIG --set name={new}")
