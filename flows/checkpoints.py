"""Which of a run's checkpoints is meant."""

from pathlib import Path

from steps.common import layout
from steps.common.artifacts import read_manifest
from steps.common.errors import InvalidInputs


def iteration_of(root: Path, asked: int | None) -> int:
    """The iteration of a finished checkpoint: the one that is asked for, or else the newest.

    Raises `InvalidInputs` where it isn't there.
    """
    numbers = layout.numbered(root, "checkpoints")
    finished = [i for i in numbers if read_manifest(root / layout.checkpoint(i))]
    if not finished:
        raise InvalidInputs(f"{root} has no finished checkpoint yet: train it first")
    if asked is None:
        return finished[-1]
    if asked not in finished:
        raise InvalidInputs(f"{root} has no finished checkpoint {asked}: there are {', '.join(map(str, finished))}")
    return asked
