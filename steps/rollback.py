"""Step `rollback`: a champion that was is champion again, because someone says so. The history keeps what happened.

A night may be under way: the run's lock is not asked for.
"""

from pathlib import Path
from typing import Any

from steps.common import layout
from steps.common.artifacts import Champion, Checkpoint
from steps.common.champion import decision_path, history, is_there, line
from steps.common.errors import InvalidInputs
from steps.common.runs import locked
from steps.common.step import Inputs, Step, Workspace


class RollbackInputs(Inputs):
    """Who gives way to whom."""

    champion: Checkpoint
    to: Checkpoint


def rollback(inputs: RollbackInputs, workspace: Workspace) -> dict[str, Any]:
    """Go back to a champion that was."""
    return {
        "decision": "rolled back",
        "checkpoint": inputs.to.model_dump(),
        "predecessor": inputs.champion.model_dump(),
        "reason": f"asked for: checkpoint {inputs.champion.iteration} gave way to checkpoint {inputs.to.iteration}",
        "test": None,
    }


ROLLBACK = Step("rollback", RollbackInputs, Champion, rollback)


def roll_back(root: Path, to: int | None) -> Champion:
    """Goes back to the champion's predecessor, or to checkpoint `to`, which must have been champion once.

    Raises `InvalidInputs` where there is none such, and `RunInUse` while another decision is made.
    """
    with locked(root / layout.CHAMPIONS):
        champions = line(root)
        if not champions:
            raise InvalidInputs(f"{root} has no champion, so nothing to roll back: `nightschool promote` makes one")
        target = predecessor(champions) if to is None else former(root, champions[0], to)
        inputs = RollbackInputs(champion=champions[0], to=target)
        return ROLLBACK.run(inputs, root, decision_path(root, inputs.fingerprint()))


def predecessor(champions: list[Checkpoint]) -> Checkpoint:
    """Raises `InvalidInputs` where the champion has none."""
    if len(champions) == 1:
        raise InvalidInputs(f"checkpoint {champions[0].iteration} is champion and has no predecessor to go back to")
    return champions[1]


def former(root: Path, champion: Checkpoint, asked: int) -> Checkpoint:
    """A champion that was, by its iteration. Raises `InvalidInputs` where it never was."""
    if asked == champion.iteration:
        raise InvalidInputs(f"checkpoint {asked} is champion already")
    promotions = [decision for decision in history(root) if decision.decision == "promoted"]
    crowned = [checkpoint for decision in promotions for checkpoint in (decision.predecessor, decision.checkpoint)]
    there = {checkpoint.iteration: checkpoint for checkpoint in crowned if is_there(root, checkpoint)}
    if asked not in there:
        known = ", ".join(map(str, sorted(there)))
        raise InvalidInputs(f"checkpoint {asked} never was champion, only {known}: `nightschool promote` tests others")
    return there[asked]


if __name__ == "__main__":
    ROLLBACK.main()
