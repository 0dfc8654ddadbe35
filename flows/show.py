"""Trajectories and tables on the terminal."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from steps.common.errors import InvalidInputs
from steps.common.evaluations import played
from steps.common.query import select

LISTED = 40
COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
console = Console()


def print_table(rows: pl.DataFrame) -> None:
    """A query's rows."""
    table = Table(*map(escape, rows.columns), header_style="bold")
    for row in rows.iter_rows():
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def print_trajectories(root: Path) -> None:
    """The newest trajectories, with the names that `show --trajectory` takes."""
    rows = select(
        root,
        f"""SELECT printf('%04d/%s/%d', iteration, task_id, attempt) AS trajectory, round(reward, 3) AS reward, turns,
                   completion_tokens AS sampled, failure_type AS failure
            FROM trajectories WHERE iteration = (SELECT max(iteration) FROM trajectories)
            ORDER BY task_id, attempt LIMIT {LISTED}""",
    )
    print_table(rows)


def print_trajectory(root: Path, name: str) -> None:
    """One trajectory's transcript, with the tokens of each turn. Raises `InvalidInputs` where there is none."""
    row = find_trajectory(root, name)
    turns = iter(sampled_turns(row["sequences"]))
    for message in json.loads(row["messages"]):
        role = str(message["role"])
        tokens = f"[dim]{next(turns, '')}[/]" if role == "assistant" else None
        console.print(
            Panel(
                escape(text_of(message)), title=role, title_align="left", subtitle=tokens, style=COLOURS.get(role, "")
            )
        )
    console.print(f"reward {_cell(row['reward'])} · {row['turns']} turns · {row['completion_tokens']} tokens sampled")
    for title, facts in (("metrics", json.loads(row["metrics"])), ("metadata", json.loads(row["metadata"]))):
        if facts:
            console.print(f"{title} {escape(json.dumps(facts))}")
    if row["failure_type"]:
        console.print(
            Panel(
                escape(row["failure_traceback"]), title=f"{row['failure_type']}: {row['failure_message']}", style="red"
            )
        )


def find_trajectory(root: Path, name: str) -> dict[str, Any]:
    """The row of `0003/task/attempt`, or of `test-0003/task/attempt` in an evaluation.

    Of another model it is `test-MODEL/task/attempt`.
    """
    others = [one.model for one in played(root) if one.iteration is None and name.startswith(f"test-{one.model}/")]
    if others:
        return _row(root, name, "evaluations", f"model = {_quoted(others[0])}", name.removeprefix(f"test-{others[0]}/"))
    iteration, _, rest = name.removeprefix("test-").partition("/")
    if not iteration.isdigit():
        raise _no_name(name)
    table = "evaluations" if name.startswith("test-") else "trajectories"
    return _row(root, name, table, f"iteration = {int(iteration)}", rest)


def _row(root: Path, name: str, table: str, who: str, rest: str) -> dict[str, Any]:
    task, _, attempt = rest.rpartition("/")
    if not attempt.isdigit():
        raise _no_name(name)
    rows = select(root, f"FROM {table} WHERE {who} AND task_id = {_quoted(task)} AND attempt = {int(attempt)}")
    if rows.is_empty():
        raise InvalidInputs(f"there is no trajectory {name!r}; `nightschool show RUN` lists the newest")
    return rows.row(0, named=True)


def _no_name(name: str) -> InvalidInputs:
    return InvalidInputs(
        f"{name!r} names no trajectory: write iteration/task/attempt, as `nightschool show RUN` lists them"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def sampled_turns(sequences: list[dict[str, Any]]) -> list[str]:
    """For each stretch of sampled tokens, how many there are and how likely they were."""
    turns = []
    for sequence in sequences:
        tokens = zip(sequence["mask"], sequence["logprobs"], strict=True)
        for sampled, stretch in groupby(tokens, key=lambda token: token[0]):
            if sampled:
                logprobs = [logprob for _, logprob in stretch]
                turns.append(f"{len(logprobs)} tokens · mean logprob {sum(logprobs) / len(logprobs):.2f}")
    return turns


def text_of(message: dict[str, Any]) -> str:
    """A message's content, and the tools it calls."""
    content = message.get("content") or ""
    calls = [
        f"→ {call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []
    ]
    return "\n".join([content if isinstance(content, str) else json.dumps(content), *calls]).strip()


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))
