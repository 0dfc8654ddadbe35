"""The pipeline's nouns: a small frozen record each, whose data lie in files beside its manifest.

An artifact holds facts about a result and nothing that differs between two ways of making it (no times, hosts or
absolute paths), so that it can be part of the next step's inputs and of their fingerprint.
"""

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steps.common import layout
from steps.common.errors import CorruptArtifact, PrunedArtifact
from steps.common.storage import files_under, sha256_of


class Record(BaseModel):
    """An immutable record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FileEntry(Record):
    """One data file of an artifact."""

    sha256: str
    bytes: int


class Manifest(Record):
    """What `manifest.json` says; its presence means that the folder is finished."""

    step: str
    fingerprint: str
    """Of the inputs: equal inputs, equal fingerprint."""
    inputs: dict[str, Any]
    artifact: dict[str, Any]
    digest: str
    """Of the data files' names and contents."""
    files: dict[str, FileEntry]
    versions: dict[str, str]
    """Of Python and the packages that made it: recorded, never compared."""
    started: datetime
    seconds: float
    measured: dict[str, float] = {}
    """What differs each time it is made: speeds, memory."""
    pruned: datetime | None = None
    """When the files were deleted to make room. The folder stays finished: what was made from it is still valid."""


class Artifact(Record):
    """A step's result. `path` is relative to the run's folder."""

    path: str
    digest: str


ArtifactT = TypeVar("ArtifactT", bound=Artifact)


class BaseModelFiles(Artifact):
    """A base model made by this run (`pretrain`): a folder that transformers and vLLM load."""

    parameters: int
    metrics: dict[str, float]


class Demonstrations(Artifact):
    """Examples for the policy to imitate: chats, or a run's own sequences of tokens."""

    source: Literal["environment", "chats", "best_of"]
    examples: int
    dropped: dict[str, int]
    """What of the source was left out, by reason."""


class Checkpoint(Artifact):
    """The policy at the start of `iteration`: a LoRA adapter in PEFT's format, and all that training needs to go on."""

    iteration: int
    base_model: str
    """A hub id, or a path relative to the run's folder: `model` or `base`."""
    base_digest: str | None = None
    """Of the base model's contents; None for a hub id."""
    step: int
    """Optimizer steps so far."""
    updated: bool
    """False where the iteration had nothing to learn from and the adapter is the previous one."""
    metrics: dict[str, float]


class Rollouts(Artifact):
    """One shard of an iteration's trajectories."""

    iteration: int
    shard: int
    groups: int
    trajectories: int
    failed: int
    failures: dict[str, int]
    """Failed rollouts by exception type."""
    mean_reward: float | None
    """Over the rollouts that did not fail."""
    sequences: int
    prompt_tokens: int
    completion_tokens: int


class Usage(Record):
    """What a judge, or a model that is compared, was asked and answered, in tokens as its server counts them."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All that count."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            answers=self.answers + other.answers,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


class Groups(Artifact):
    """An iteration's trajectories, scored and filtered."""

    iteration: int
    groups: int
    kept: int
    dropped: dict[str, int]
    """Dropped groups by reason."""
    trajectories: int
    failed: int
    failures: dict[str, int]
    mean_reward: float | None
    """Over all scored trajectories, kept or not."""
    judge: Usage | None = Field(None, exclude_if=lambda used: used is None)
    """What the scores took, whenever that was paid. None without a judge, and not written then."""


class Batch(Artifact):
    """What one update learns from."""

    iteration: int
    sequences: int
    tokens: int
    """Tokens to process."""
    trained_tokens: int
    """Tokens that the policy sampled."""
    dropped: dict[str, int]
    """Dropped sequences by reason."""


class HeldOut(Artifact):
    """How one attempt at each held-out task went."""

    tasks: int
    failed: int
    failures: dict[str, int]
    reward: float
    """Mean over the tasks whose rollout did not fail."""
    stderr: float
    """Standard error of that mean."""
    metrics: dict[str, float]
    """Means of the environment's own metrics."""


class Evaluation(HeldOut):
    """Held-out tasks played by one checkpoint."""

    iteration: int


class OtherModel(Record):
    """A model that is compared with a run's checkpoints, and is none of them."""

    name: str
    """As its server knows it; or `base`, the run's base model; or `run@7`, a checkpoint of another run."""
    digest: str | None = None
    """Of its files, where they are known."""


class ModelEvaluation(HeldOut):
    """Held-out tasks played by another model, with the same seeds."""

    model: OtherModel
    usage: Usage
    """What the attempts took, as its server counts; 0 where it doesn't."""


class PairedTest(Record):
    """How two checkpoints compare on the same tasks. Rewards are means over the pairs."""

    method: str
    pairs: int
    """Tasks that both played."""
    different: int
    """Pairs whose rewards differ."""
    left_out: int
    """Tasks whose rollout failed on either side."""
    challenger: float
    incumbent: float
    difference: float
    lower: float
    """The difference is at least this, with one-sided `confidence`."""
    confidence: float
    margin: float
    """What `lower` must be above."""


class Champion(Artifact):
    """A decision about who is champion. The folder of all of them, in order, is the history."""

    decision: Literal["promoted", "kept", "rolled back"]
    """`kept`: as a candidate; who was champion still is."""
    checkpoint: Checkpoint
    """The one that it is about: the challenger, or the one that was gone back to."""
    predecessor: Checkpoint
    """Who was champion until then; where there was none yet, checkpoint 0."""
    reason: str
    test: PairedTest | None
    """None where it was no test that decided."""


def read_artifact(kind: type[ArtifactT], root: Path, path: str) -> ArtifactT:
    """An artifact that is finished, as it is: whatever its settings were. Raises `CorruptArtifact`."""
    manifest = read_manifest(root / path)
    if manifest is None:
        raise CorruptArtifact(f"{root / path} has no {layout.MANIFEST}: it was never finished")
    if not manifest.pruned:
        check_files(root / path, manifest)
    return kind.model_validate({**manifest.artifact, "path": path, "digest": manifest.digest})


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where it is not finished.

    Raises `CorruptArtifact` where the file can't be understood.
    """
    file = folder / layout.MANIFEST
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise CorruptArtifact(
            f"{file} is not a manifest ({error.error_count()} errors, first: {error.errors()[0]['msg']}); "
            f"restore it from a backup, or move {folder} away to make it again"
        ) from None


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """sha256 and size of every data file, by its name relative to `folder`."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256_of(path), bytes=path.stat().st_size)
        for path in files_under(folder)
        if path != folder / layout.MANIFEST
    }


def digest_of(files: dict[str, FileEntry]) -> str:
    """One hash for all names and contents."""
    return hashlib.sha256(
        json.dumps({name: entry.sha256 for name, entry in files.items()}, sort_keys=True).encode()
    ).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """The quick check: each file is there with its size.

    Raises `CorruptArtifact`, naming the first that is not, and `PrunedArtifact`.
    """
    if manifest.pruned:
        raise PrunedArtifact(
            f"{folder} was pruned on {manifest.pruned:%Y-%m-%d}: its files are gone; restore it from a backup"
        )
    for name, entry in manifest.files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CorruptArtifact(
                f"{file} {found}, its manifest says {entry.bytes} bytes; "
                f"restore it from a backup, or move {folder} away to make it again"
            )


def refuse_pruned(folder: Path) -> None:
    """Raises `PrunedArtifact` where the folder's files were deleted to make room."""
    if (manifest := read_manifest(folder)) and manifest.pruned:
        check_files(folder, manifest)


def verify(folder: Path) -> Manifest:
    """The full check: reads every file and compares its sha256. Raises `CorruptArtifact` and `PrunedArtifact`."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise CorruptArtifact(f"{folder} has no {layout.MANIFEST}: it was never finished")
    check_files(folder, manifest)
    found = describe_files(folder)
    if strangers := sorted(set(found) - set(manifest.files)):
        raise CorruptArtifact(f"{folder} holds {strangers[0]}, which its manifest does not know")
    for name, entry in manifest.files.items():
        if found[name].sha256 != entry.sha256:
            raise CorruptArtifact(f"{folder / name} differs from its manifest: the sha256 is another")
    return manifest
