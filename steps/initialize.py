"""Step `initialize`: gives a base model its first adapter, which changes nothing yet. Makes checkpoint 0.

A fork's first adapter is the one that it was forked with.
"""

from typing import Any

from steps.common.artifacts import Checkpoint
from steps.common.origin import Origin
from steps.common.settings import Dtype, LoraSettings
from steps.common.step import Inputs, Step, Workspace


class InitializeInputs(Inputs):
    """What checkpoint 0 is made of."""

    base_model: str
    """A hub id, or a folder relative to the run's: `model` or `base`."""
    base_digest: str | None = None
    """Of the base model's contents; None for a hub id."""
    dtype: Dtype = "float32"
    """Of the base model's weights."""
    lora: LoraSettings = LoraSettings()
    seed: int = 0
    origin: Origin | None = None
    """In a fork, where its first adapter comes from."""


def initialize(inputs: InitializeInputs, workspace: Workspace) -> dict[str, Any]:
    """Makes a run's first checkpoint: an untrained LoRA adapter for the base model, or a fork's."""
    from steps.grpo import start

    return start(inputs, workspace)


INITIALIZE = Step("initialize", InitializeInputs, Checkpoint, initialize)

if __name__ == "__main__":
    INITIALIZE.main()
