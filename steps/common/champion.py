"""Who is champion: the checkpoint that agents work with by day, told from the history of decisions and nothing else.

    champions/0000 … 0007/    promoted, kept or rolled back: a manifest each, with the reason

The champions that were are a line: a promotion puts one in front, a rollback goes back along it. Checkpoint 0 ends it,
since the first champion has beaten it. One whose checkpoint is gone, or was made anew after a rewind, is passed over.
"""

from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Champion, Checkpoint, read_artifact, read_manifest


def champion(root: Path) -> int | None:
    """The iteration of the checkpoint that is champion, None before any is. Raises `CorruptArtifact`."""
    champions = line(root)
    return champions[0].iteration if champions else None


def line(root: Path) -> list[Checkpoint]:
    """The champion, its predecessor, that one's predecessor, … of those that are there. Raises `CorruptArtifact`."""
    champions: list[Checkpoint] = []
    for decision in history(root):
        if decision.decision == "promoted":
            champions = [decision.checkpoint, *(champions or [decision.predecessor])]
        elif decision.decision == "rolled back":
            known = decision.checkpoint in champions
            champions = (
                champions[champions.index(decision.checkpoint) :] if known else [decision.checkpoint, *champions]
            )
    return [checkpoint for checkpoint in champions if is_there(root, checkpoint)]


def history(root: Path) -> list[Champion]:
    """All decisions, the oldest first. Raises `CorruptArtifact`."""
    paths = map(layout.champion, layout.numbered(root, layout.CHAMPIONS))
    return [read_artifact(Champion, root, path) for path in paths]


def decision_path(root: Path, fingerprint: str) -> str:
    """Where the next decision goes; that of the last one where it was made from inputs with this very fingerprint."""
    last = max(layout.numbered(root, layout.CHAMPIONS), default=-1)
    manifest = read_manifest(root / layout.champion(last)) if last >= 0 else None
    repeated = manifest is not None and manifest.fingerprint == fingerprint
    return layout.champion(last if repeated else last + 1)


def incumbent(root: Path) -> Checkpoint:
    """Whom a challenger has to beat: the champion, or checkpoint 0 where there is none. Raises `CorruptArtifact`."""
    champions = line(root)
    return champions[0] if champions else read_artifact(Checkpoint, root, layout.checkpoint(0))


def judged(root: Path, challenger: Checkpoint) -> Champion | None:
    """The last test of this checkpoint, None where it was never put to one. Raises `CorruptArtifact`."""
    tests = [decision for decision in history(root) if decision.test and decision.checkpoint == challenger]
    return tests[-1] if tests else None


def is_there(root: Path, checkpoint: Checkpoint) -> bool:
    """Is it still where it was, as it was? Raises `CorruptArtifact`."""
    manifest = read_manifest(root / checkpoint.path)
    return manifest is not None and manifest.digest == checkpoint.digest
