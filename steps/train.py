"""Step `train`: updates the adapter from an iteration's stored batch. Makes the next checkpoint.

TRL's GRPOTrainer does the forward pass, the loss and the optimizer step. With several processes started by
`accelerate launch -m steps.train …` or `torchrun`, each takes its share and the first one writes.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from steps.common.artifacts import Batch, Checkpoint, Record
from steps.common.settings import Dtype
from steps.common.step import Inputs, Step, Workspace


class TrainSettings(Record):
    """How an iteration's batch becomes an update. Names and formulas are TRL's where TRL has them."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """The loss of TRL's GRPOTrainer. `grpo` with sequence-level ratios is GSPO."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """A ratio for each token, or one a sequence: exp of the mean over its sampled tokens."""
    epsilon: NonNegativeFloat = 0.2
    """The ratio is clipped below 1 - epsilon."""
    epsilon_high: NonNegativeFloat | None = None
    """The ratio is clipped above 1 + epsilon_high (None: epsilon); for cispo the largest weight itself, say 5."""
    delta: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the unclipped ratio: two-sided clipping, for advantages below zero."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL to the base model, or to what examples made of it where the run starts from some (`[sft]`)."""
    use_bias_correction_kl: bool = True
    """Weights that KL by the importance ratio, which makes its gradient unbiased off policy."""
    old_logprobs: Literal["behaviour", "recompute", "current"] = "recompute"
    """What the ratio compares with: the sampler's own log-probabilities, those of the trainer's model before the
    iteration's first step, or the policy itself (ratio 1, nothing clipped)."""
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """Weights by how the trainer's model before the first step differs from the sampler, per token or a whole sequence:
    clamped or zeroed outside [correction_min, correction_max]. Not with `behaviour`, whose ratio holds it already."""
    correction_max: PositiveFloat | None = 3.0
    """None: no bound."""
    correction_min: NonNegativeFloat | None = None
    """None: no bound."""
    max_completion_length: PositiveInt | None = None
    """The constant that dr_grpo divides by, in tokens."""
    learning_rate: NonNegativeFloat = 1e-5
    """Of AdamW, in the first iteration."""
    final_learning_rate: NonNegativeFloat | None = None
    """Reached in a straight line after `decay_iterations` iterations, then kept. None: the rate is constant."""
    decay_iterations: PositiveInt | None = None
    """The horizon of that line. A run may be shorter or longer: it changes nothing."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of AdamW's running mean of gradients that a step keeps."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """The same of the mean of their squares."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients of a larger norm are scaled down to it."""
    updates_per_iteration: PositiveInt = 1
    """Optimizer steps: the batch's trajectories are shuffled and dealt into as many minibatches."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Most tokens, padding included, of one forward and backward pass: a matter of memory and speed."""
    gradient_checkpointing: bool = False
    """Less memory for a third more time."""
    max_kl: PositiveFloat | None = None
    """Before each step but the first: where the policy's KL to the sampler on its minibatch (Schulman's k3, nats, mean
    over tokens) is larger, the iteration's remaining steps are skipped and counted."""
    min_entropy: NonNegativeFloat = 0.0
    """The step fails where the mean entropy (nats a sampled token) of its last minibatch is lower. 0: off."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("loss_type cispo needs epsilon_high, the largest weight (5 in its paper)")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type dr_grpo needs max_completion_length, the constant it divides by")
        if self.old_logprobs == "behaviour" and self.importance_correction != "none":
            raise ValueError(
                "old_logprobs behaviour leaves nothing to correct: set importance_correction to none, "
                "or old_logprobs to recompute"
            )
        if self.loss_type == "vespo" and self.importance_correction.startswith("sequence"):
            raise ValueError("loss_type vespo takes importance_correction none, token_truncate or token_mask")
        if (self.final_learning_rate is None) != (self.decay_iterations is None):
            raise ValueError("final_learning_rate and decay_iterations go together")
        return self

    def learning_rate_at(self, iteration: int) -> float:
        """The rate of an iteration, by nothing but its number: the same in any process, in a run of any length."""
        if self.final_learning_rate is None or self.decay_iterations is None:
            return self.learning_rate
        left = max(0.0, 1 - iteration / self.decay_iterations)
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * left


class TrainInputs(Inputs):
    """What the next checkpoint is made of."""

    checkpoint: Checkpoint
    """The policy that sampled the batch."""
    batch: Batch
    settings: TrainSettings = TrainSettings()
    temperature: PositiveFloat = 1.0
    """Of the sampling: divides the logits in the loss too."""
    dtype: Dtype = "float32"
    """Of the base model's weights and of the computation; the adapter is float32."""
    seed: int = 0
    """Of the shuffle."""


def train(inputs: TrainInputs, workspace: Workspace) -> dict[str, Any]:
    """Makes the next checkpoint: one iteration's optimizer steps from stored rollouts."""
    from steps.grpo import update

    return update(inputs, workspace)


TRAIN = Step("train", TrainInputs, Checkpoint, train)

if __name__ == "__main__":
    TRAIN.main()
