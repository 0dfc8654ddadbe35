"""Goes back to a step: what it made, and everything that was made from that, is set aside. Nothing is deleted."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from steps.common import layout
from steps.common.errors import InvalidInputs
from steps.common.runs import locked
from steps.common.step import sweep_partials

StepName = Literal["pretrain", "initialize", "rollout", "group", "collate", "train", "evaluate"]


def rewind(root: Path, iteration: int, step: StepName) -> tuple[Path, list[str]]:
    """Moves the step's folder and all that follow from it to `superseded/<UTC time>/`; returns that, and their paths.

    Raises `RunInUse`, and `InvalidInputs` where there is nothing to set aside.
    """
    with locked(root):
        sweep_partials(root)
        paths = [path for path in _made_from(root, iteration, step) if (root / path).exists()]
        if not paths:
            raise InvalidInputs(f"{root} has nothing that {step} of iteration {iteration} made")
        aside = root / layout.SUPERSEDED / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
        # What follows goes first: stopped half-way, the rest is still a run without gaps.
        for path in reversed(paths):
            target = aside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / path).rename(target)
    return aside, paths


def _made_from(root: Path, iteration: int, step: StepName) -> list[str]:
    """Paths in the order in which they were made."""
    if step == "evaluate":
        return [layout.evaluation(iteration)]
    if step in ("pretrain", "initialize"):
        return [layout.MODEL] * (step == "pretrain") + _from_checkpoint(root, 0)
    own = {
        "rollout": [f"iterations/{iteration:04d}"],
        "group": [layout.groups(iteration), layout.batch(iteration)],
        "collate": [layout.batch(iteration)],
        "train": [],
    }
    return own[step] + _from_checkpoint(root, iteration + 1)


def _from_checkpoint(root: Path, first: int) -> list[str]:
    """Checkpoints from `first` on, with what they played."""
    last = max((*layout.numbered(root, "checkpoints"), *layout.numbered(root, "iterations"), first))
    return [
        path
        for i in range(first, last + 1)
        for path in (layout.checkpoint(i), layout.evaluation(i), f"iterations/{i:04d}")
    ]
