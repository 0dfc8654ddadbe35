"""(c) Share of an iteration that is neither generation nor update, from the manifests of a run.

    python benchmarks/overhead.py             # trains a small run in a temporary folder first
    python benchmarks/overhead.py runs/demo   # of a run that is there

An iteration lasts from one checkpoint to the next. Generation is from the first shard's start to the last one's end,
with the evaluation where there is one; update is the train step's own work. The rest is what orchestration costs:
loading and probing the adapter, grouping, collating, processes, manifests, Prefect.
"""

import os
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from steps.common import layout
from steps.common.artifacts import Manifest, read_manifest

CONFIG = Path(__file__).parents[1] / "configs/demo.toml"
SMALLER = ["name=overhead", "iterations=6", "model.pretrain.steps=100", "evaluate.every=6", "evaluate.tasks=32"]


def main(root: Path) -> None:
    """Prints a row an iteration after the first, and their mean."""
    rows = [row for i in layout.numbered(root, "iterations")[1:] if (row := measure(root, i))]
    table = Table("iteration", "seconds", "generation", "update", "rest", "share of the rest")
    for iteration, (total, generation, update) in rows:
        table.add_row(str(iteration), *cells(total, generation, update))
    means = [sum(row[column] for _, row in rows) / len(rows) for column in range(3)]
    table.add_section()
    table.add_row("mean", *cells(*means))
    Console().print(table)


def cells(total: float, generation: float, update: float) -> list[str]:
    rest = total - generation - update
    return [f"{seconds:.2f}" for seconds in (total, generation, update, rest)] + [f"{rest / total:.0%}"]


def measure(root: Path, iteration: int) -> tuple[int, tuple[float, float, float]] | None:
    """Seconds of an iteration: in all, of generation, of the update. None where it is not finished."""
    before, after = (read_manifest(root / layout.checkpoint(i)) for i in (iteration, iteration + 1))
    if not before or not after:
        return None
    played = [read_manifest(path.parent) for path in root.glob(f"iterations/{iteration:04d}/rollouts/*/manifest.json")]
    spans = [(shard.started, end(shard)) for shard in played if shard]
    if evaluation := read_manifest(root / layout.evaluation(iteration)):
        spans.append((evaluation.started, end(evaluation)))
    return iteration, ((end(after) - end(before)).total_seconds(), covered(spans), after.seconds)


def end(manifest: Manifest) -> datetime:
    return manifest.started + timedelta(seconds=manifest.seconds)


def covered(spans: list[tuple[datetime, datetime]]) -> float:
    """Seconds in which at least one span was under way."""
    seconds, until = 0.0, datetime.min.replace(tzinfo=spans[0][0].tzinfo)
    for start, stop in sorted(spans):
        seconds += max(0.0, (stop - max(start, until)).total_seconds())
        until = max(until, stop)
    return seconds


def train_small_run(runs: Path) -> Path:
    """A run for the purpose, by the real command."""
    nightschool = Path(sys.executable).parent / "nightschool"
    environment = os.environ | {"NIGHTSCHOOL_RUNS": str(runs)}
    settings = [argument for setting in SMALLER for argument in ("--set", setting)]
    try:
        subprocess.run([nightschool, "train", CONFIG, *settings], env=environment, check=True, timeout=900)
    finally:
        subprocess.run([nightschool, "down"], env=environment, check=True, timeout=60)
    return runs / "overhead"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(train_small_run(Path(folder)))
