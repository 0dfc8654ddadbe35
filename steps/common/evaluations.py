"""All that has played a run's held-out tasks: its checkpoints, and other models. From manifests alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steps.common import layout
from steps.common.artifacts import Manifest, Record, read_manifest

FOLDER = "evaluations"
BASE = "base"
"""What the run's base model is called."""


class Played(Record):
    """One evaluation."""

    path: str
    model: str
    """`run@7` for a checkpoint, of this run or another; `base`; or the name that the model's server knows."""
    iteration: int | None
    """Of this run's checkpoint; None for another model."""
    manifest: Manifest

    @property
    def is_usual(self) -> bool:
        """False for a checkpoint's evaluation by other settings than those that it was first evaluated with."""
        return self.iteration is None or self.path == layout.evaluation(self.iteration)

    @property
    def environment(self) -> dict[str, Any]:
        """Its name and options: only in the same one do rewards compare."""
        environment: dict[str, Any] = self.manifest.inputs["environment"]
        return environment

    @property
    def n(self) -> int:
        """Tasks whose rollout did not fail."""
        return int(self.manifest.artifact["tasks"] - self.manifest.artifact["failed"])


def played(root: Path) -> Iterator[Played]:
    """The finished ones, by path. Raises `CorruptArtifact`."""
    for folder in sorted((root / FOLDER).glob("[!.]*")):
        if manifest := read_manifest(folder):
            number = folder.name.partition("-")[0]
            iteration = int(number) if number.isdigit() else None
            model = manifest.artifact["model"]["name"] if iteration is None else f"{root.name}@{iteration}"
            path = folder.relative_to(root).as_posix()
            yield Played(path=path, model=model, iteration=iteration, manifest=manifest)
