"""Every path in a run's folder, relative to it.

Artifacts and inputs hold these relative paths only, so that a run can be moved, mounted elsewhere, or restored.
"""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from re import sub

MANIFEST = "manifest.json"
RUN = "run.json"
LOCK = ".lock"
LOGS = "logs"
MODEL = "model"
BASE = "base"
"""A link to the base model, where that was there before the run: all in a run that differs between machines."""
ORIGIN = "origin"
"""The checkpoint that a fork starts from."""
DEMONSTRATIONS = "demonstrations"
"""The examples that a run starts from."""
REPORT = "report.html"
CHAMPIONS = "champions"
SUPERSEDED = "superseded"
JUDGE = "judge"
"""What the judge of groups has answered: a file for each request, in no artifact, so that none is paid twice."""
DAY = f"{LOGS}/day"
"""Of those that serve a checkpoint to agents by day: a folder each."""
GROUPS = ".groups"
"""Suffix of the hidden folder that holds the finished groups of a shard that is not finished."""
HALFWAY = ".sft"
"""Suffix of the hidden folder that holds the state of an SFT that is not finished."""
PARTIAL = ".partial"
"""Suffix of the hidden folder that a step fills before it is renamed into place."""


def checkpoint(iteration: int) -> str:
    """The policy that plays iteration `iteration`; 0 is the untrained adapter."""
    return f"checkpoints/{iteration:04d}"


def shards(iteration: int) -> str:
    """All of an iteration's rollouts."""
    return f"iterations/{iteration:04d}/rollouts"


def rollouts(iteration: int, shard: int) -> str:
    """Trajectories of one shard: whole groups."""
    return f"{shards(iteration)}/{shard:03d}"


def groups(iteration: int) -> str:
    """Scored groups, kept or dropped with the reason."""
    return f"iterations/{iteration:04d}/groups"


def batch(iteration: int) -> str:
    """What the trainer reads."""
    return f"iterations/{iteration:04d}/batch"


def evaluation(iteration: int) -> str:
    """Held-out tasks played by `checkpoint(iteration)`."""
    return f"evaluations/{iteration:04d}"


def evaluation_anew(iteration: int, fingerprint: str) -> str:
    """Where `evaluation(iteration)` was made from other settings: one from inputs with this fingerprint."""
    return f"{evaluation(iteration)}-{fingerprint[:8]}"


def model_evaluation(model: str, fingerprint: str) -> str:
    """Held-out tasks played by another model, from inputs with this fingerprint."""
    return f"evaluations/model-{sub('[^A-Za-z0-9_]+', '-', model)[:60].strip('-')}-{fingerprint[:8]}"


def champion(number: int) -> str:
    """A decision about who is champion; the last ones tell who it is now."""
    return f"{CHAMPIONS}/{number:04d}"


def night(day: date) -> str:
    """What a night was to reach."""
    return f"nights/{day.isoformat()}.json"


def log(step: str, path: str) -> str:
    """The log of the step that makes `path`; attempts append."""
    return f"{LOGS}/{step}/{path.replace('/', '-')}.log"


def artifacts(root: Path) -> Iterator[str]:
    """Every folder that is an artifact of the run at `root`, sorted.

    What is hidden was never finished, whatever it holds; what was set aside, and logs, are none of the run's artifacts.
    """
    for file in sorted(root.rglob(MANIFEST)):
        parts = file.parent.relative_to(root).parts
        if parts and parts[0] not in (SUPERSEDED, LOGS) and not any(part.startswith(".") for part in parts):
            yield "/".join(parts)


def numbered(root: Path, folder: str) -> list[int]:
    """Numbers of the folders in `root/folder`, ascending: what is there, finished or not."""
    parent = root / folder
    return sorted(int(p.name) for p in parent.iterdir() if p.name.isdigit()) if parent.is_dir() else []
