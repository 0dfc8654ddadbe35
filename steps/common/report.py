"""What one wants to know of a run at breakfast, from its manifests: a row an iteration, the curve, a page.

The page, `report.html`, stands by itself: no script, no other file. Where other models have played, they are compared
by their tables of rewards.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Manifest, Record, read_manifest
from steps.common.comparison import Comparison, comparison
from steps.common.status import EvaluationStatus, Status, status_of
from steps.common.storage import write_atomically

WIDTH, HEIGHT, MARGIN = 720, 260, 40
TRAINED, HELD_OUT, OTHERS = "#4269d0", "#d1495b", "#6a7f2a"
STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em;padding:0 1em}td,th{padding:.2em .8em;text-align:right}"
    "svg{width:100%;height:auto}"
)


class IterationReport(Record):
    """An iteration that was grouped. Rewards are means; what is not made yet is None."""

    iteration: int
    reward: float | None
    held_out: float | None
    """Of the checkpoint that played it."""
    kept: int
    groups: int
    failed: int
    """Rollouts."""
    kl: float | None
    """Of the update, from the policy that played (Schulman's k3, nats a token)."""
    clip_fraction: float | None
    seconds: dict[str, float]
    """By step; of rollouts from the first shard's start to the last one's end."""


class Report(Record):
    """A run as it stands."""

    run: str
    iterations: list[IterationReport]
    evaluations: list[EvaluationStatus]
    notes: list[str]
    """Who is champion, and why; how far the run is backed up."""
    others: Comparison | None = None
    """Other models and the checkpoint that they are compared with; None where none has played."""


def report_of(root: Path) -> Report:
    """Raises `CorruptArtifact`, naming the file."""
    status = status_of(root)
    held_out = {evaluation.iteration: evaluation.reward for evaluation in status.evaluations}
    rows = [
        _iteration(root, i, groups, held_out.get(i))
        for i in layout.numbered(root, "iterations")
        if (groups := read_manifest(root / layout.groups(i)))
    ]
    return Report(
        run=root.name,
        iterations=rows,
        evaluations=status.evaluations,
        others=comparison(root, checkpoints=False) if status.models else None,
        notes=list(notes_of(status)),
    )


def notes_of(status: Status) -> Iterator[str]:
    """A line for each thing beside the training that one wants to know."""
    if start := status.start:
        lost = start.dropped | {
            name.removeprefix("dropped_"): int(count)
            for name, count in start.metrics.items()
            if name.startswith("dropped_")
        }
        loss, accuracy = start.metrics["loss"], start.metrics["token_accuracy"]
        learnt = f"loss {loss:.3f}, token accuracy {accuracy:.2f}; left out: {_listed(lost)}"
        yield f"started from {start.examples} examples ({start.source}), {learnt}"
    if status.champion is not None:
        yield f"champion: checkpoint {status.champion}"
    if decision := status.last_decision:
        yield f"{decision.decision}: {decision.reason}"
    if backup := status.backup:
        where = f" in {backup.to}" if backup.to else ""
        failed = f"; the last {backup.failures} failed: {backup.reason}" if backup.reason else ""
        yield f"backup: {backup.artifacts} of {backup.artifacts + backup.missing} artifacts{where}{failed}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def cells(row: IterationReport) -> dict[str, str]:
    """A row as text, by column."""
    return {
        "iteration": str(row.iteration),
        "reward": _number(row.reward, ".3f"),
        "held-out": _number(row.held_out, ".3f"),
        "groups kept": f"{row.kept} of {row.groups}",
        "failed rollouts": str(row.failed),
        "KL": _number(row.kl, ".2g"),
        "clip fraction": _number(row.clip_fraction, ".2g"),
        "seconds": ", ".join(f"{step} {_seconds_as_text(seconds)}" for step, seconds in row.seconds.items()),
    }


def write_html(root: Path, report: Report) -> Path:
    """Writes the page into the run's folder."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    page = (
        f"<!doctype html><meta charset=utf-8><title>{escape(report.run)}</title><style>{STYLE}</style>"
        f"<h1>{escape(report.run)}</h1>{curve(report)}{notes}{_table(compared(report))}"
        f"{_table([cells(row) for row in report.iterations])}"
    )
    write_atomically(root / layout.REPORT, page.encode())
    return root / layout.REPORT


def compared(report: Report) -> list[dict[str, str]]:
    """The rows of other models, as text, by column."""
    return report.others.cells() if report.others else []


def _table(rows: Sequence[dict[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.values())}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def curve(report: Report) -> str:
    """Rewards over checkpoints as SVG: the iterations' own as a line, held-out ones with their standard errors.

    Other models learn nothing, so each is a level.
    """
    trained = [(row.iteration, row.reward) for row in report.iterations if row.reward is not None]
    bars = [(e.iteration, e.reward - e.stderr, e.reward, e.reward + e.stderr) for e in report.evaluations]
    levels = [
        (row.model, row.reward) for row in (report.others.models if report.others else []) if not row.is_checkpoint
    ]
    values = [reward for _, reward in (*trained, *levels)] + [value for bar in bars for value in bar[1:]]
    if not values:
        return ""
    low, high, last = min(values), max(values), max((i for i, *_ in (*trained, *bars)), default=0)
    if math.isclose(low, high):
        low, high = low - 0.5, high + 0.5

    def x(iteration: int) -> str:
        return f"{MARGIN + iteration * (WIDTH - 2 * MARGIN) / max(last, 1):.1f}"

    def y(reward: float) -> str:
        return f"{HEIGHT - MARGIN - (reward - low) * (HEIGHT - 2 * MARGIN) / (high - low):.1f}"

    grid = [
        f'<path d="M{MARGIN} {y(level)}H{WIDTH - MARGIN}" stroke="#ddd"/>{_text(2, y(level), f"{level:.2f}")}'
        for level in (low, (low + high) / 2, high)
    ]
    line = " ".join(f"{x(i)},{y(reward)}" for i, reward in trained)
    marks = [
        f'<path d="M{x(i)} {y(bottom)}V{y(top)}" stroke="{HELD_OUT}"/>'
        f'<circle cx="{x(i)}" cy="{y(reward)}" r="3.5" fill="{HELD_OUT}"/>'
        for i, bottom, reward, top in bars
    ]
    marks += [
        f'<path d="M{MARGIN} {y(reward)}H{WIDTH - MARGIN}" stroke="{OTHERS}" stroke-dasharray="5 4"/>'
        f"{_text(MARGIN + 4, float(y(reward)) - 4, escape(model), OTHERS)}"
        for model, reward in levels
    ]
    if len(trained) == 1:  # no line yet
        marks += [f'<circle cx="{x(i)}" cy="{y(reward)}" r="3.5" fill="{TRAINED}"/>' for i, reward in trained]
    labels = [
        _text(MARGIN, HEIGHT - 14, "0"),
        _text(WIDTH - MARGIN, HEIGHT - 14, f"{last}"),
        _text(WIDTH / 2, HEIGHT - 14, "checkpoint"),
        _text(MARGIN, 18, "training reward", TRAINED),
        _text(MARGIN + 130, 18, "held-out reward ± standard error", HELD_OUT),
        *([_text(MARGIN + 350, 18, "other models' held-out reward", OTHERS)] if levels else []),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(grid)}'
        f'<polyline points="{line}" fill="none" stroke="{TRAINED}" stroke-width="2"/>{"".join(marks + labels)}</svg>'
    )


def _iteration(root: Path, i: int, groups: Manifest, held_out: float | None) -> IterationReport:
    facts, following = groups.artifact, read_manifest(root / layout.checkpoint(i + 1))
    metrics = following.artifact["metrics"] if following else {}
    return IterationReport(
        iteration=i,
        reward=facts["mean_reward"],
        held_out=held_out,
        kept=facts["kept"],
        groups=facts["groups"],
        failed=facts["failed"],
        kl=metrics.get("approx_kl"),
        clip_fraction=metrics.get("clip_fraction"),
        seconds=dict(_seconds(root, i, groups, following)),
    )


def _seconds(root: Path, i: int, groups: Manifest, following: Manifest | None) -> Iterator[tuple[str, float]]:
    numbers = layout.numbered(root, layout.shards(i))
    shards = [read_manifest(root / layout.rollouts(i, shard)) for shard in numbers]
    if spans := [(m.started, m.started + timedelta(seconds=m.seconds)) for m in shards if m]:
        yield "rollout", (max(end for _, end in spans) - min(start for start, _ in spans)).total_seconds()
    others: Sequence[tuple[str, Manifest | None]] = [
        ("group", groups),
        ("collate", read_manifest(root / layout.batch(i))),
        ("train", following),
        ("evaluate", read_manifest(root / layout.evaluation(i))),
    ]
    yield from ((step, manifest.seconds) for step, manifest in others if manifest)


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)  # Prefect would make a bullet of a hyphen


def _seconds_as_text(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _text(x: float, y: float | str, text: str, colour: str = "#555") -> str:
    return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12" fill="{colour}">{text}</text>'
