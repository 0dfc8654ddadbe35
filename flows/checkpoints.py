"""Which of a run's checkpoints is meant."""

from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Checkpoint, read_artifact, read_manifest
from steps.common.champion import incumbent, line
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


def contenders(root: Path, asked: int | None) -> tuple[Checkpoint, Checkpoint]:
    """The challenger, which is the newest where none is asked for, and whom it has to beat.

    Raises `InvalidInputs` where they are the same.
    """
    challenger = read_artifact(Checkpoint, root, layout.checkpoint(iteration_of(root, asked)))
    if challenger == (champion := incumbent(root)):
        raise InvalidInputs(f"checkpoint {challenger.iteration} is the one that others have to beat: name another")
    return challenger, champion


def to_serve(root: Path, champion: bool, iteration: int | None) -> Checkpoint:
    """The champion, or the checkpoint that is asked for; where neither is asked for, the champion or else the newest.

    Raises `InvalidInputs` where it isn't there.
    """
    if champion and iteration is not None:
        raise InvalidInputs("--champion and --iteration ask for one checkpoint each: give one of them")
    if iteration is None and (champions := line(root)):
        return champions[0]
    if champion:
        raise InvalidInputs(f"{root} has no champion yet: `nightschool promote` makes one, --iteration takes any other")
    return read_artifact(Checkpoint, root, layout.checkpoint(iteration_of(root, iteration)))
