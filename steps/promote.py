"""Step `promote`: a challenger meets the champion, or checkpoint 0 where there is none, and one of them is champion.

Both have played the same held-out tasks with the same seeds. The challenger is promoted where a paired test says that
it is better by the margin; else it is kept as a candidate, with the reason.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from steps.common import tables
from steps.common.artifacts import Champion, Checkpoint, Evaluation, PairedTest, Record
from steps.common.paired import compare, fewest
from steps.common.step import Inputs, Step, Workspace


class PromotionSettings(Record):
    """When a challenger is better than the champion."""

    margin: float = 0.0
    """By how much its mean held-out reward must be higher, at least."""
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """Of the one-sided test that says so. Equals are promoted in 1 - confidence of all nights."""


class PromoteInputs(Inputs):
    """Two checkpoints, and what each has played."""

    challenger: Checkpoint
    incumbent: Checkpoint
    """The champion, or checkpoint 0 where there is none."""
    challenger_played: Evaluation
    incumbent_played: Evaluation
    settings: PromotionSettings = PromotionSettings()


def promote(inputs: PromoteInputs, workspace: Workspace) -> dict[str, Any]:
    """Promote the challenger, or keep it as a candidate."""
    challenger, incumbent = (
        rewards_of(workspace.root, played) for played in (inputs.challenger_played, inputs.incumbent_played)
    )
    test = compare(challenger, incumbent, inputs.settings.confidence, inputs.settings.margin)
    better = test is not None and is_enough(test) and test.lower > test.margin
    return {
        "decision": "promoted" if better else "kept",
        "checkpoint": inputs.challenger.model_dump(),
        "predecessor": inputs.incumbent.model_dump(),
        "reason": reason_of(test, inputs),
        "test": test and test.model_dump(),
    }


def rewards_of(root: Path, played: Evaluation) -> dict[str, float | None]:
    """Rewards by task; None where the rollout failed. Raises `CorruptArtifact`."""
    columns = {name: tables.TRAJECTORY_COLUMNS[name] for name in ("task_id", "reward")}
    return dict(tables.read([root / played.path / tables.TRAJECTORIES], columns).iter_rows())


def is_enough(test: PairedTest) -> bool:
    """Did enough tasks go differently to say anything?"""
    return test.different >= fewest(test.confidence)


def reason_of(test: PairedTest | None, inputs: PromoteInputs) -> str:
    """One line, with the numbers."""
    new, old = inputs.challenger.iteration, inputs.incumbent.iteration
    if test is None:
        return f"checkpoint {new} and checkpoint {old} have no held-out task that neither of them failed"
    facts = [
        f"checkpoint {new} has {test.challenger:.3g} and checkpoint {old} has {test.incumbent:.3g} "
        f"on {test.pairs} held-out tasks",
        *([f"{test.left_out} more failed for one of them"] if test.left_out else []),
    ]
    sure = f"{100 * test.confidence:.3g} % confidence"
    if is_enough(test):
        word = "above" if test.lower > test.margin else "not above"
        verdict = (
            f"the difference is {test.difference:+.3g}, with {sure} at least {test.lower:+.3g} (paired bootstrap), "
            f"{word} the margin of {test.margin:.3g}"
        )
    else:
        verdict = f"only {test.different} of them went differently, and {sure} needs {fewest(test.confidence)}"
    return f"{', '.join(facts)}: {verdict}"


PROMOTE = Step("promote", PromoteInputs, Champion, promote)

if __name__ == "__main__":
    PROMOTE.main()
