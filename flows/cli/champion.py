"""Commands about the champion: the checkpoint that agents work with by day."""

from typing import Annotated

import typer

from flows.cli.arguments import RunName

app = typer.Typer()


@app.command()
def promote(
    run: RunName,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="The challenger's number; without it the newest that is finished.")
    ] = None,
) -> None:
    """Have a checkpoint meet the champion on held-out tasks, and promote it where it is better."""
    from flows.command import promote_with_server

    promote_with_server(run, iteration)


@app.command()
def rollback(
    run: RunName,
    to: Annotated[
        int | None, typer.Option(min=0, help="A checkpoint that was champion; without it the champion's predecessor.")
    ] = None,
) -> None:
    """Make a champion that was champion again."""
    from flows.runtimes.service import served_by_day
    from steps.common.runs import find_run
    from steps.rollback import roll_back

    root = find_run(run)
    decision = roll_back(root, to)
    typer.echo(f"champion  checkpoint {decision.checkpoint.iteration}")
    typer.echo(f"before    checkpoint {decision.predecessor.iteration}")
    for iteration, url in served_by_day(root):
        typer.echo(f"served    checkpoint {iteration} at {url}, until that `nightschool serve` is stopped")


@app.command()
def serve(
    run: RunName,
    champion: Annotated[bool, typer.Option("--champion", help="The champion, and nothing else.")] = False,
    iteration: Annotated[int | None, typer.Option(min=0, help="The checkpoint with this number.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 is a free one.")] = 0,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
) -> None:
    """Serve the champion, or the newest checkpoint where there is none, as OpenAI's API, until Ctrl-C."""
    from flows.checkpoints import to_serve
    from flows.serve import serve_by_day
    from steps.common.runs import find_run

    root = find_run(run)
    serve_by_day(root, to_serve(root, champion, iteration), host, port, typer.echo)
