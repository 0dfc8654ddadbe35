"""Commands that take a checkpoint elsewhere."""

from pathlib import Path
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
    origin: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="A place of backups to find it in, s3://bucket/prefix.")
    ] = None,
) -> None:
    """Start a new run from a checkpoint of another."""
    from steps.common.runs import find_run
    from steps.fork import ForkInputs, make_run, make_run_from_bucket
    from steps.remote.settings import BucketSettings

    with_optimizer = not without_optimizer
    if origin:
        folder = make_run_from_bucket(BucketSettings.at(origin), run, iteration, with_optimizer, new)
    else:
        root = find_run(run)
        run = root.name
        asked = ForkInputs(run=run, iteration=iteration, with_optimizer=with_optimizer, source=str(root), folder=root)
        folder = make_run(asked, new)
    typer.echo(f"{folder} starts from checkpoint {iteration} of {run}: `nightschool train CONFIG --set name={new}`")


@app.command()
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not be there, or be empty.")],
    iteration: Annotated[
        int | None, typer.Option(min=0, help="The checkpoint; without it the champion, or else the newest.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="One model in transformers' format, not the adapter.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the Hugging Face hub too, with HF_TOKEN.")
    ] = None,
) -> None:
    """Write a checkpoint as others load it: for PEFT, or merged for transformers, with tokenizer and model card."""
    from flows.checkpoints import to_serve
    from flows.export import export as write
    from steps.common.runs import find_run

    root = find_run(run)
    checkpoint = to_serve(root, False, iteration)
    if status := write(root, checkpoint, to, merge, push):
        raise typer.Exit(status)
    typer.echo(f"checkpoint {checkpoint.iteration} of {root.name} is in {to}")
