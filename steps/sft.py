"""Step `sft`: has the policy imitate examples before it is trained by reward. Makes checkpoint 0.

The adapter, an untrained one or a fork's, is trained by TRL's SFTTrainer on what the assistant says in the examples,
and on nothing else. The checkpoint is like any other, and the run goes on from it as from an untrained one, but for two
things. Its adapter is kept as the reference of the KL: with `train.beta`, the policy is held near what it learnt here,
and not near the base model. And the optimizer of the iterations starts afresh, also in a fork that has its origin's:
moments of one loss say nothing about another.

A kill costs a minute: the state of the training is kept beside the step's folder, as finished groups are.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from steps.common import layout
from steps.common.artifacts import Checkpoint, Demonstrations, Record
from steps.common.step import Step, Workspace
from steps.initialize import InitializeInputs


class SftSettings(Record):
    """How examples are imitated."""

    epochs: PositiveInt = 1
    """How often each example is seen, every time in another order."""
    batch_size: PositiveInt = 16
    """Examples an optimizer step. The loss is the mean over all that the assistant says in them, in tokens."""
    learning_rate: PositiveFloat = 2e-4
    """The highest: reached in a straight line, then it falls in one to 0 at the last step."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the steps on the way up."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    max_tokens: Annotated[int, Field(ge=2)] = 4096
    """Longer examples are left out and counted, never cut."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Most tokens, padding included, of one forward and backward pass: a matter of memory and speed."""
    gradient_checkpointing: bool = False
    """Less memory for a third more time."""


class SftInputs(InitializeInputs):
    """What checkpoint 0 is made of."""

    demonstrations: Demonstrations
    settings: SftSettings = SftSettings()


def sft(inputs: SftInputs, workspace: Workspace) -> dict[str, Any]:
    """Makes a run's first checkpoint: an adapter that has learnt to imitate examples."""
    from steps.grpo import imitate

    return imitate(inputs, workspace)


def forget(target: Path) -> None:
    """Removes what was kept of attempts at `target`, of settings that were given up, too."""
    for folder in target.parent.glob(f".{target.name}.*{layout.HALFWAY}"):
        shutil.rmtree(folder)


SFT = Step("sft", SftInputs, Checkpoint, sft, tidy=forget)

if __name__ == "__main__":
    SFT.main()
