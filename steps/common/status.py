"""Where a run stands, read from its manifests: light, and safe while the run is at work."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from steps.common import layout
from steps.common.artifacts import Manifest, Record, Usage, read_manifest, verify
from steps.common.backups import BackupStatus, backup_of
from steps.common.champion import champion, history
from steps.common.errors import CorruptArtifact, PrunedArtifact
from steps.common.evaluations import played
from steps.common.origin import origin_of
from steps.common.runs import in_use, read_record


class CheckpointStatus(Record):
    """The policy at the start of `iteration`."""

    iteration: int
    complete: bool
    """False for a folder without a manifest."""


class EvaluationStatus(Record):
    """Held-out reward of one checkpoint."""

    iteration: int
    reward: float
    stderr: float
    n: int
    """Tasks whose rollout did not fail."""


class ModelStatus(Record):
    """Held-out reward of another model."""

    model: str
    reward: float
    stderr: float
    n: int
    """Tasks whose rollout did not fail."""


class IterationStatus(Record):
    """The newest iteration that was grouped."""

    iteration: int
    groups: int
    kept: int
    dropped: dict[str, int]
    """Groups by reason."""
    failed: dict[str, int]
    """Rollouts by exception."""
    judge: Usage | None = None
    """What a judge took to score it; None without one."""
    judge_price: float | None = None
    """By the prices that were set then."""


class StartStatus(Record):
    """The examples that checkpoint 0 has learnt to imitate."""

    source: str
    """`environment`, `chats` or `best_of`."""
    examples: int
    dropped: dict[str, int]
    """What was left out when they were gathered, by reason."""
    metrics: dict[str, float]
    """Of checkpoint 0: loss (nats a token) and token_accuracy over the last epoch, dropped_… by reason, and more."""


class DecisionStatus(Record):
    """The newest line in the history of champions."""

    iteration: int
    """Of the checkpoint that it is about."""
    decision: str
    """`promoted`, `kept` or `rolled back`."""
    reason: str


class Status(Record):
    """What `nightschool status --json` prints."""

    run: str
    state: Literal["running", "finished", "stopped"]
    """`running`: a process holds its lock; `finished`: the last checkpoint is there and evaluated; else `stopped`."""
    origin: str | None
    """What it was forked from."""
    iterations: int
    """Asked for."""
    checkpoints: list[CheckpointStatus]
    evaluations: list[EvaluationStatus]
    models: list[ModelStatus]
    """Other models, in the environment of the run's settings."""
    last_iteration: IterationStatus | None
    start: StartStatus | None = None
    """None where the run did not start from examples."""
    champion: int | None = None
    """The iteration of the checkpoint that is champion; None before one was promoted."""
    last_decision: DecisionStatus | None = None
    backup: BackupStatus | None = None
    """None where no backup was ever tried."""


def status_of(root: Path) -> Status:
    """Raises `CorruptArtifact`, naming the file."""
    config = read_record(root).config
    target = int(config["iterations"])
    evaluations = [_evaluation(i, manifest) for i, manifest in _finished(root, "evaluations")]
    return Status(
        run=root.name,
        state="running" if in_use(root) else "finished" if _reached(root, target) else "stopped",
        origin=str(origin) if (origin := origin_of(root)) else None,
        iterations=target,
        checkpoints=[
            CheckpointStatus(iteration=i, complete=read_manifest(root / layout.checkpoint(i)) is not None)
            for i in layout.numbered(root, "checkpoints")
        ],
        evaluations=evaluations,
        models=_models(root, config.get("environment")),
        last_iteration=_last_iteration(root),
        start=_start(root),
        champion=champion(root),
        last_decision=_last_decision(root),
        backup=backup_of(root),
    )


def damages(root: Path) -> Iterator[tuple[Path, str | None]]:
    """Every artifact of the run with what is wrong with it, or None: reads each file in full. Pruned ones have none."""
    for path in layout.artifacts(root):
        folder = root / path
        try:
            verify(folder)
        except PrunedArtifact:
            continue
        except CorruptArtifact as error:
            yield folder, str(error)
        else:
            yield folder, None


def pruned(root: Path) -> list[str]:
    """Paths of the artifacts whose files were deleted to make room. Raises `CorruptArtifact`."""
    found = ((path, read_manifest(root / path)) for path in layout.artifacts(root))
    return [path for path, manifest in found if manifest and manifest.pruned]


def _reached(root: Path, target: int) -> bool:
    last = (layout.checkpoint(target), layout.evaluation(target))
    return all(read_manifest(root / path) for path in last)


def _start(root: Path) -> StartStatus | None:
    gathered, first = read_manifest(root / layout.DEMONSTRATIONS), read_manifest(root / layout.checkpoint(0))
    if gathered is None or first is None or first.step != "sft":
        return None
    facts = {name: gathered.artifact[name] for name in ("source", "examples", "dropped")}
    return StartStatus(**facts, metrics=first.artifact["metrics"])


def _evaluation(iteration: int, manifest: Manifest) -> EvaluationStatus:
    facts: dict[str, Any] = manifest.artifact
    return EvaluationStatus(
        iteration=iteration, reward=facts["reward"], stderr=facts["stderr"], n=facts["tasks"] - facts["failed"]
    )


def _models(root: Path, environment: object) -> list[ModelStatus]:
    return [
        ModelStatus(model=one.model, reward=facts["reward"], stderr=facts["stderr"], n=one.n)
        for one in played(root)
        if one.iteration is None and one.environment == environment and (facts := one.manifest.artifact)
    ]


def _last_decision(root: Path) -> DecisionStatus | None:
    decisions = history(root)
    if not decisions:
        return None
    last = decisions[-1]
    return DecisionStatus(iteration=last.checkpoint.iteration, decision=last.decision, reason=last.reason)


def _last_iteration(root: Path) -> IterationStatus | None:
    for i in reversed(layout.numbered(root, "iterations")):
        if manifest := read_manifest(root / layout.groups(i)):
            facts = manifest.artifact
            return IterationStatus(
                iteration=i,
                groups=facts["groups"],
                kept=facts["kept"],
                dropped=facts["dropped"],
                failed=facts["failures"],
                judge=facts.get("judge"),
                judge_price=manifest.measured.get("judge_price"),
            )
    return None


def _finished(root: Path, folder: str) -> Iterator[tuple[int, Manifest]]:
    for i in layout.numbered(root, folder):
        if manifest := read_manifest(root / folder / f"{i:04d}"):
            yield i, manifest
