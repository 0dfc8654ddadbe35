"""A run's report as Prefect shows it: artifacts under the run's name, of which each iteration adds a version."""

import re
from base64 import b64encode
from html import escape
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from steps.common.report import Report, cells, compared, curve, report_of, write_html

SHOWN = 200
"""Iterations in the table: the newest. The page in the run's folder has all of them."""


def show_report(root: Path) -> None:
    """Writes `report.html`, and makes the artifacts `<run>-rewards` and `<run>-iterations`."""
    report = report_of(root)
    page = write_html(root, report)
    create_markdown_artifact(
        markdown(report, page), key=key_of(report.run, "rewards"), description=f"Rewards of the run {report.run}."
    )
    create_table_artifact(
        [cells(row) for row in reversed(report.iterations[-SHOWN:])],
        key=key_of(report.run, "iterations"),
        description=f"Iterations of the run {report.run}, the newest first. All of them: `{page}`",
    )


def key_of(run: str, what: str) -> str:
    """The key of a run's artifact: lower case, digits and dashes are all that Prefect takes."""
    return f"{re.sub('[^a-z0-9]+', '-', run.lower()).strip('-')}-{what}"


def markdown(report: Report, page: Path) -> str:
    """The curve, held-out rewards, how other models do, and where the page is."""
    picture = f"![rewards](data:image/svg+xml;base64,{b64encode(curve(report).encode()).decode()})"
    rows = [f"| {e.iteration} | {e.reward:.3f} ± {e.stderr:.3f} | {e.n} |" for e in report.evaluations]
    table = ["| checkpoint | held-out reward | tasks |", "| --- | --- | --- |", *rows] if rows else []
    others = compared(report)
    if others:
        cells = [tuple(escape(cell).replace("|", "\\|") for cell in row.values()) for row in others]
        table += ["", *(f"| {' | '.join(row)} |" for row in (tuple(others[0]), ("---",) * len(others[0]), *cells))]
    notes = [line for note in report.notes for line in (note, "")]
    return "\n".join([f"## {report.run}", "", picture, "", *notes, *table, "", f"Every iteration: `{page}`"])
