"""How other models and a run's checkpoints do on the same held-out tasks.

All of them have played with the same seeds, so what is compared is pairs: the rewards of two models for one task. The
reference is the champion, or else the newest checkpoint that was evaluated.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steps.common.artifacts import Record
from steps.common.champion import champion
from steps.common.evaluations import Played, played
from steps.common.paired import Interval, interval
from steps.common.runs import read_record

CONFIDENCE = 0.95
COLUMNS = ("task", "reward", "turns", "prompt_tokens", "completion_tokens")
REFUSED = "warned_refused_"


class Compared(Record):
    """One model. Rewards are means over the tasks whose rollout did not fail."""

    model: str
    """With what its settings differ in from the reference's."""
    is_checkpoint: bool
    """Of this run?"""
    reward: float
    stderr: float
    tasks: int
    failed: int
    difference: Interval | None
    """Its rewards less the reference's; None for that itself, and where no task was played by both."""
    turns: float
    """Mean of the model's calls."""
    prompt_tokens: int
    """Sum over all tasks, as the server counts them."""
    completion_tokens: int
    price: float | None
    """By the prices that were given."""


class Comparison(Record):
    """What has played in one environment, the best first."""

    reference: str | None
    """The checkpoint that the others are compared with."""
    models: list[Compared]
    elsewhere: int
    """Evaluations in other environments, or with other options, which can't be compared."""

    def cells(self) -> list[dict[str, str]]:
        """Its rows as text, by column."""
        rows = [_cells(row, self.reference) for row in self.models]
        if all(row.price is None for row in self.models):
            return [{name: text for name, text in row.items() if name != "price"} for row in rows]
        return rows


def comparison(root: Path, environment: Mapping[str, Any] | None = None, *, checkpoints: bool) -> Comparison:
    """Compares all that has played in `environment`, by default that of the run's settings.

    With all of the run's checkpoints, or with the reference only. Raises `CorruptArtifact`.
    """
    environment = environment or read_record(root).config["environment"]
    found = [one for one in played(root) if not one.manifest.pruned]
    here = [one for one in found if one.environment == environment]
    reference = _reference(root, here)
    rows = [one for one in here if checkpoints or one.iteration is None or one is reference]
    rewards = _rewards(_frame(root, reference)) if reference else {}
    compared = [_compared(root, one, reference, rewards) for one in rows]
    return Comparison(
        reference=reference.model if reference else None,
        models=sorted(compared, key=lambda row: -row.reward),
        elsewhere=len(found) - len(here),
    )


def _cells(row: Compared, reference: str | None) -> dict[str, str]:
    failed = f" of {row.tasks}" if row.failed else ""
    counted = row.prompt_tokens or row.completion_tokens
    return {
        "model": row.model,
        "held-out reward": f"{row.reward:.3f} ± {row.stderr:.3f}",
        "tasks": f"{row.tasks - row.failed}{failed}",
        **({f"less {reference} ({CONFIDENCE:.0%})": _difference(row.difference)} if reference else {}),
        "turns": f"{row.turns:.1f}",
        "tokens in + out": f"{row.prompt_tokens:,} + {row.completion_tokens:,}" if counted else "—",
        "price": "—" if row.price is None else f"{row.price:.4g}",
    }


def _reference(root: Path, here: Sequence[Played]) -> Played | None:
    own = {one.iteration: one for one in here if one.iteration is not None and one.is_usual}
    best = champion(root)
    return own[best] if best in own else own[max(own)] if own else None


def _compared(root: Path, one: Played, reference: Played | None, rewards: Mapping[str, float | None]) -> Compared:
    frame = _frame(root, one)
    facts = one.manifest.artifact
    return Compared(
        model=_label(one, reference),
        is_checkpoint=one.iteration is not None,
        reward=facts["reward"],
        stderr=facts["stderr"],
        tasks=facts["tasks"],
        failed=facts["failed"],
        difference=None if one is reference else interval(_rewards(frame), rewards, CONFIDENCE),
        turns=frame["turns"].mean(),
        prompt_tokens=frame["prompt_tokens"].sum(),
        completion_tokens=frame["completion_tokens"].sum(),
        price=one.manifest.measured.get("price"),
    )


def _frame(root: Path, one: Played) -> Any:
    from steps.common import tables  # `nightschool status` does without Polars

    columns = {name: tables.TRAJECTORY_COLUMNS[name] for name in COLUMNS}
    return tables.read([root / one.path / tables.TRAJECTORIES], columns)


def _rewards(frame: Any) -> dict[str, float | None]:
    return dict(frame.select("task", "reward").iter_rows())


def _label(one: Played, reference: Played | None) -> str:
    """The model's name, and how its requests were others than the reference's."""
    sampling = one.manifest.inputs["sampling"]
    usual = reference.manifest.inputs["sampling"] if reference else sampling
    others = [f"{key} {value}" for key, value in sampling.items() if value != usual[key]]
    refused = [key.removeprefix(REFUSED) for key in one.manifest.measured if key.startswith(REFUSED)]
    others += [f"own {key}" for key in refused if key != "max_tokens"]
    return f"{one.model} ({', '.join(others)})" if others else one.model


def _difference(pairs: Interval | None) -> str:
    if pairs is None:
        return "—"
    between = "unsure" if pairs.low is None else f"{pairs.low:+.3f} … {pairs.high:+.3f}"
    return f"{pairs.difference:+.3f} ({between})"
