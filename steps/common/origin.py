"""Where a fork comes from: a checkpoint of another run, which was copied into this one as `origin`."""

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from steps.common import layout
from steps.common.artifacts import Artifact, Checkpoint, read_artifact
from steps.common.errors import InvalidInputs
from steps.common.settings import LoraSettings


class Origin(Artifact):
    """The checkpoint that a fork starts from."""

    run: str
    checkpoint: Checkpoint
    """As that run knows it."""
    lora: LoraSettings
    """What its adapter was made with."""
    with_optimizer: bool
    sft: dict[str, Any] | None = Field(None, exclude_if=lambda table: table is None)
    """That table of its run's settings: the examples that it has learnt from. Not written where there is none."""

    def __str__(self) -> str:
        without = "" if self.with_optimizer else ", without its optimizer"
        return f"checkpoint {self.checkpoint.iteration} of {self.run}{without}"

    def check(self, base_model: str | None, base_digest: str | None, lora: LoraSettings) -> None:
        """Raises `InvalidInputs` where a run's settings are for another base model or adapter."""
        if (base_model, base_digest) != (self.checkpoint.base_model, self.checkpoint.base_digest):
            base = _name(self.checkpoint.base_model, self.checkpoint.base_digest)
            raise InvalidInputs(
                f"the settings name {_name(base_model, base_digest)} as base model, but the run comes from {self}, "
                f"which is on {base}: name that one"
            )
        if _facts(lora) != _facts(self.lora):
            raise InvalidInputs(
                f"lora = {_toml(lora)} is not that of the adapter that the run was forked with ({self}): it has "
                f"{_toml(self.lora)}"
            )


def origin_of(root: Path) -> Origin | None:
    """What the run was forked from, None where it was not. Raises `CorruptArtifact`."""
    return read_artifact(Origin, root, layout.ORIGIN) if (root / layout.ORIGIN).exists() else None


def _name(base_model: str | None, digest: str | None) -> str:
    if base_model is None:
        return "one that is still to be made"
    kinds = {layout.MODEL: "the model that its run made", layout.BASE: "the model in a folder"}
    return kinds.get(base_model, base_model) + (f" (digest {digest[:12]})" if digest else "")


def _facts(lora: LoraSettings) -> dict[str, object]:
    return lora.model_dump() | {"target_modules": sorted(lora.target_modules)}


def _toml(lora: LoraSettings) -> str:
    return f"{{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in _facts(lora).items())} }}"
