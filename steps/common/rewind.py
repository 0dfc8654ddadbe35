"""Goes back to a step: what it made, and all that was made from that, is set aside. Nothing is deleted.

The step is done again. What follows from it comes back where its inputs are still the same, and is made anew where
they are not: manifests hold the digests of what they were made from, so an unchanged result costs nothing downstream.

    superseded/<UTC time>/rewind.json      what is to be done again, and who asked; written last
    superseded/<UTC time>/<path>           what was at <path>

A step that is still at work where its flow was killed loses the folder that it fills: it can't finish any more what
nobody asks for now. One that is not concerned goes on, and the next flow finds it.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from steps.common import layout
from steps.common.artifacts import Record, read_manifest, refuse_pruned
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.evaluations import BASE, played
from steps.common.runs import locked
from steps.common.step import partials_of
from steps.common.storage import sync, write_atomically

StepName = Literal[
    "pretrain", "demonstrations", "initialize", "sft", "rollout", "group", "collate", "train", "evaluate"
]
BEFORE = ("pretrain", "demonstrations", "initialize", "sft")
"""What comes before the iterations. Checkpoint 0 is made by `initialize` or by `sft`."""
RECORD = "rewind.json"
MOMENT = "%Y-%m-%dT%H%M%S.%fZ"
"""The names of what was set aside: when."""


class Rewind(Record):
    """A step to do again."""

    iteration: int = Field(ge=0)
    """The iteration to go back to; for evaluate, the number of the checkpoint."""
    step: StepName
    """The first step to do again."""
    shard: int | None = Field(None, ge=0)
    """Only this shard of the rollouts."""


class RewindRecord(Record):
    """`rewind.json`: until it is written, what was moved counts as set aside by nobody, and comes back."""

    again: list[str]
    """Paths to be made anew: of these, nothing that was set aside up to now comes back."""
    asked_by: str | None
    """The flow run that asked."""


def rewind(root: Path, target: Rewind, asked_by: str | None = None) -> tuple[Path, list[str]]:
    """Sets aside what `target` made and all that follows from it; returns the folder that it is in now, and the paths.

    Raises `RunInUse`, `InvalidInputs` where there is nothing to set aside, and `PrunedArtifact` where what the step is
    made from is gone.
    """
    with locked(root):
        again = list(_made_by(root, target))
        if not any((root / path).exists() for path in again):
            raise InvalidInputs(f"{root} has nothing that {_name(target)} made")
        for path in _needed_by(root, target):
            refuse_pruned(root / path)
        return _set_aside(root, again, _made_from(root, target.iteration, target.step), asked_by)


def rescore(root: Path, iteration: int) -> tuple[Path, list[str]]:
    """Sets aside the groups of `iteration` and of all later ones, and what follows from the first.

    Raises `RunInUse`, `InvalidInputs` where there are none, and `PrunedArtifact` where some of the rollouts are gone.
    """
    with locked(root):
        later = [i for i in layout.numbered(root, "iterations") if i >= iteration]
        again = [layout.groups(i) for i in later if (root / layout.groups(i)).exists()]
        if layout.groups(iteration) not in again:
            raise InvalidInputs(f"{root} has no groups of iteration {iteration}")
        for shard in (shard for i in later for shard in _shards(root, i)):
            refuse_pruned(root / shard)
        return _set_aside(root, again, _made_from(root, iteration, "group"), None)


def was_rewound(root: Path, asked_by: str) -> bool:
    """Has this flow run gone back already?"""
    return any(record.asked_by == asked_by for _, record in _rewinds(root) if record)


def bring_back(root: Path, path: str, fingerprint: str) -> bool:
    """Puts back what was set aside from `path` and was made from inputs with this fingerprint; False where none was.

    The newest wins. What a rewind asked to make anew stays aside, and so does all that was set aside before it.
    """
    for aside, record in _rewinds(root):
        if record and path in record.again:
            return False
        manifest = read_manifest(aside / path)
        if manifest and manifest.fingerprint == fingerprint:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).rename(root / path)
            sync((root / path).parent)
            return True
    return False


def _set_aside(root: Path, again: list[str], follow: list[str], asked_by: str | None) -> tuple[Path, list[str]]:
    aside = root / layout.SUPERSEDED / datetime.now(UTC).strftime(MOMENT)
    own = [path for path in again if not any(f"{path}/".startswith(f"{other}/") for other in follow)]
    for partial in (partial for path in [*own, *follow] for partial in partials_of(root / path)):
        with suppress(FileNotFoundError):  # it was finished just now
            _move(partial, aside / partial.relative_to(root))
    paths = [path for path in [*own, *follow] if (root / path).exists()]
    for path in reversed(paths):
        _move(root / path, aside / path)
    write_atomically(aside / RECORD, RewindRecord(again=again, asked_by=asked_by).model_dump_json(indent=1).encode())
    return aside, paths


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)


def _made_by(root: Path, target: Rewind) -> Iterator[str]:
    """Paths of the step's own artifacts; of rollouts also the groups that an unfinished shard has played."""
    i = target.iteration
    if target.step == "rollout":
        shards = "[0-9]*" if target.shard is None else f"{target.shard:03d}"
        for names in (shards, f".{shards}.*.groups"):
            yield from (f"{layout.shards(i)}/{path.name}" for path in sorted((root / layout.shards(i)).glob(names)))
    elif target.shard is not None:
        raise InvalidInputs(f"only rollouts have shards, not {target.step}")
    else:
        yield {
            "pretrain": layout.MODEL,
            "demonstrations": layout.DEMONSTRATIONS,
            "initialize": layout.checkpoint(0),
            "sft": layout.checkpoint(0),
            "group": layout.groups(i),
            "collate": layout.batch(i),
            "train": layout.checkpoint(i + 1),
            "evaluate": layout.evaluation(i),
        }[target.step]


def _needed_by(root: Path, target: Rewind) -> list[str]:
    """Paths of what the step is made from, with the checkpoint that is trained on where the outcome changes."""
    i = target.iteration
    if target.step in BEFORE:
        return []
    given = {"group": _shards(root, i), "collate": _shards(root, i), "train": [layout.batch(i)]}
    return [layout.checkpoint(i), *given.get(target.step, [])]


def _shards(root: Path, iteration: int) -> list[str]:
    return [layout.rollouts(iteration, shard) for shard in layout.numbered(root, layout.shards(iteration))]


def _made_from(root: Path, iteration: int, step: StepName) -> list[str]:
    """Paths of what follows, in the order in which they were made."""
    if step == "evaluate":
        return []
    if step in BEFORE:
        of_the_base = [one.path for one in played(root) if one.model == BASE]
        return [*([layout.DEMONSTRATIONS, *of_the_base] if step == "pretrain" else []), *_from_checkpoint(root, 0)]
    own = [layout.groups(iteration), layout.batch(iteration)]
    steps = {"rollout": own, "group": own[1:], "collate": [], "train": []}
    return steps[step] + _from_checkpoint(root, iteration + 1)


def _from_checkpoint(root: Path, first: int) -> list[str]:
    """Checkpoints from `first` on, with what they played."""
    last = max((*layout.numbered(root, "checkpoints"), *layout.numbered(root, "iterations"), first))
    return [
        path
        for i in range(first, last + 2)  # the next one may be at work
        for path in (layout.checkpoint(i), layout.evaluation(i), f"iterations/{i:04d}")
    ]


def _rewinds(root: Path) -> Iterator[tuple[Path, RewindRecord | None]]:
    """The folders of what was set aside, newest first, with their records. Raises `CorruptArtifact`."""
    parent = root / layout.SUPERSEDED
    for aside in sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []:
        yield aside, _read(aside / RECORD)


def _read(file: Path) -> RewindRecord | None:
    try:
        return RewindRecord.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CorruptArtifact(
            f"{file} can't be read ({error.errors()[0]['msg']}): move {file.parent} away, and nothing in it comes back"
        ) from None


def _name(target: Rewind) -> str:
    shard = "" if target.shard is None else f", shard {target.shard}"
    return f"{target.step} of iteration {target.iteration}{shard}"
