"""`nightschool …`: a thin face over flows and steps, a file for each kind of command.

Commands import what they need when they run, so that looking at a run takes no time.
"""

import sys
from pathlib import Path

import typer

from flows.cli import backups, champion, checkpoints, looking, machine, prune, training

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for kind in (training, champion, checkpoints, looking, backups, prune, machine):
    app.add_typer(kind.app)


@app.callback()
def nightschool() -> None:
    """Trains multi-step LLM agents with GRPO."""


def main() -> None:
    """The command: errors that one line explains are that line, on stderr."""
    from steps.common.step import exit_status_of

    sys.path.append(str(Path.cwd()))  # where steps, which are `python -m`, find a user's agent too
    sys.exit(exit_status_of(app))
