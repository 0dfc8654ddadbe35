"""Where a run stands, on the terminal. Imports nothing heavy."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steps.common.status import IterationStatus, Status
from steps.remote.standing import BackupStatus


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
    if status.champion is not None:
        console.print(f"champion: checkpoint {status.champion}")
    if decision := status.last_decision:
        console.print(f"{decision.decision}: {escape(decision.reason)}", soft_wrap=True)
    if backup := status.backup:
        console.print(_backed_up(backup), soft_wrap=True)
    if last := status.last_iteration:
        facts = [
            f"{last.kept} of {last.groups} groups kept",
            *_counted(last.dropped),
            *_counted(last.failed, "failed: "),
            *_judged(last),
        ]
        console.print(f"iteration {last.iteration}: {', '.join(facts)}")


def _backed_up(backup: BackupStatus) -> str:
    whole = f"backup: {backup.artifacts} of {backup.artifacts + backup.missing} artifacts"
    where = f" in {escape(backup.to)}" if backup.to else ""
    failed = f"; the last {backup.failures} failed: {escape(backup.reason)}" if backup.reason else ""
    return f"{whole}{where}{failed}"


def _judged(iteration: IterationStatus) -> list[str]:
    if iteration.judge is None:
        return []
    price = f" for {iteration.judge_price:.4g}" if iteration.judge_price else ""
    return [f"judged with {iteration.judge.tokens:,} tokens{price}"]


def _counted(counts: dict[str, int], prefix: str = "") -> list[str]:
    return [f"{prefix}{count} {reason}" for reason, count in counts.items()]
