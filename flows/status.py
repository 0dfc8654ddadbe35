"""Where a run stands, on the terminal. Imports nothing heavy."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steps.common.comparison import Comparison
from steps.common.report import notes_of
from steps.common.status import IterationStatus, Status

WIDTH = 120
"""Of a table that says little when it is squeezed."""


def print_status(status: Status) -> None:
    """The state, and a row an evaluation."""
    console = Console()
    complete = [c.iteration for c in status.checkpoints if c.complete]
    newest = f"checkpoint {complete[-1]} of {status.iterations}" if complete else "no checkpoint yet"
    console.print(f"[bold]{escape(status.run)}[/] is {status.state}: {newest}")
    if status.origin:
        console.print(f"forked from {escape(status.origin)}")
    if status.evaluations:
        table = Table("iteration", "held-out reward", "tasks", box=None, header_style="bold")
        for row in status.evaluations:
            table.add_row(str(row.iteration), f"{row.reward:.3f} ± {row.stderr:.3f}", str(row.n))
        console.print(table)
    if status.models:
        table = Table("model", "held-out reward", "tasks", box=None, header_style="bold")
        for other in status.models:
            table.add_row(escape(other.model), f"{other.reward:.3f} ± {other.stderr:.3f}", str(other.n))
        console.print(table)
    for note in notes_of(status):
        console.print(escape(note), soft_wrap=True)
    if last := status.last_iteration:
        facts = [
            f"{last.kept} of {last.groups} groups kept",
            *_counted(last.dropped),
            *_counted(last.failed, "failed: "),
            *_judged(last),
        ]
        console.print(f"iteration {last.iteration}: {', '.join(facts)}")


def print_comparison(found: Comparison) -> None:
    """A row a model, the best first."""
    console = Console(width=max(Console().width, WIDTH))
    rows = found.cells()
    table = Table(*map(escape, rows[0]), box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print(table)
    if found.elsewhere:
        console.print(f"not compared: {found.elsewhere} evaluations with other settings of the environment")


def _judged(iteration: IterationStatus) -> list[str]:
    if iteration.judge is None:
        return []
    price = f" for {iteration.judge_price:.4g}" if iteration.judge_price else ""
    return [f"judged with {iteration.judge.tokens:,} tokens{price}"]


def _counted(counts: dict[str, int], prefix: str = "") -> list[str]:
    return [f"{prefix}{count} {reason}" for reason, count in counts.items()]
