"""Step `pretrain`: makes a tiny base model from an environment's demonstrations, where no model can be downloaded.

It learns the format and what a demonstration's player would do; to be good at the task is left to the training proper.
"""

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from steps.common.artifacts import BaseModelFiles, Record
from steps.common.settings import EnvironmentSettings
from steps.common.step import Inputs, Step, Workspace


class PretrainSettings(Record):
    """A small Qwen3 and its training. The defaults learn Tic-Tac-Toe in two minutes of one core."""

    hidden_size: Annotated[int, Field(ge=8)] = 128
    """Numbers that stand for a token between the layers."""
    layers: PositiveInt = 3
    """Each is attention and a feed-forward part."""
    heads: PositiveInt = 4
    """Of attention, a layer."""
    key_value_heads: PositiveInt = 2
    """Shared by the heads, in groups of equal size."""
    head_size: int = 32
    """vLLM's attention on CPUs takes 32, 64, 80, 96, 112, 128, 192 and 256."""
    mlp_size: Annotated[int, Field(ge=8)] = 384
    """Numbers within a feed-forward part."""
    max_vocabulary: Annotated[int, Field(ge=260)] = 381
    """Byte-level BPE: 256 bytes, 3 special tokens, and as many merges as the demonstrations give, up to this."""
    context: Annotated[int, Field(ge=16)] = 1024
    """Longest sequence, in tokens."""
    steps: PositiveInt = 700
    """Updates in all."""
    batch_size: PositiveInt = 16
    """Demonstrations a step; each is used once."""
    learning_rate: PositiveFloat = 3e-3
    """After `warmup_steps`; then it falls in a straight line to a twentieth."""
    warmup_steps: NonNegativeInt = 50
    """In which the learning rate rises in a straight line."""
    weight_decay: NonNegativeFloat = 0.01
    """Of AdamW."""
    other_tokens_weight: NonNegativeFloat = 1.0
    """Weight in the loss of all other tokens than the assistant's: to predict them teaches where to look."""


class PretrainInputs(Inputs):
    """What the base model is made of."""

    environment: EnvironmentSettings
    settings: PretrainSettings = PretrainSettings()
    seed: int = 0


def pretrain(inputs: PretrainInputs, workspace: Workspace) -> dict[str, Any]:
    """Makes a tiny base model that imitates an environment's demonstrations."""
    from steps.grpo import warm_start

    return warm_start(inputs, workspace)


PRETRAIN = Step("pretrain", PretrainInputs, BaseModelFiles, pretrain)

if __name__ == "__main__":
    PRETRAIN.main()
