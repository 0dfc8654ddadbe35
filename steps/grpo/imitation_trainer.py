"""TRL's SFTTrainer on examples that are tokens already.

As in `RecordTrainer` one optimizer step is one item of the data loader, so that steps may differ in size, and
`training_step` adds the micro-batches up. Forward, loss, gradients, clipping and optimizer are TRL's.
"""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PrinterCallback
from trl import SFTConfig, SFTTrainer

from steps.common.errors import InvalidInputs
from steps.common.progress import Progress
from steps.grpo.batch import Example, Tensors

Part = tuple[list[Example], float]
"""A micro-batch, and its share of the trained tokens of its batch."""


class Batch(NamedTuple):
    """One optimizer step. Of several ranks each has its own parts, and all have as many."""

    epoch: int
    parts: list[Part]
    tokens: int
    """Trained ones, of all ranks."""


class Seen(NamedTuple):
    """A batch as it was just before its step."""

    batch: Batch
    loss: float
    accuracy: float
    """Share of the trained tokens that the policy thought likeliest."""


class ImitationTrainer(SFTTrainer):
    """Trains on batches of examples, one optimizer step each."""

    model: PeftModel
    args: SFTConfig
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        args: SFTConfig,
        batches: list[Batch],
        *,
        warmup: int,
    ) -> None:
        # Its row is never read.
        rows = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        self.batches, self.warmup = batches, warmup
        self.seen: list[Seen] = []
        self.progress = Progress(len(batches), "steps")
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches still to come. Not prepared by accelerate: each rank was dealt its own."""
        return DataLoader(
            cast(Any, self.batches[len(self.seen) :]), batch_size=1, collate_fn=lambda batches: batches[0]
        )

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Up in a straight line over the warm-up, then down in one; no step has the rate 0."""
        steps = len(self.batches)

        def share(step: int) -> float:
            up = (step + 1) / (self.warmup + 1)
            return up if step < self.warmup else max(0.0, (steps - step) / (steps - self.warmup))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Adds up the gradients of a batch, `inputs`. Raises `InvalidInputs` where the loss is not finite."""
        loss, accuracy = torch.zeros((), device=self.args.device), 0.0
        tokens = torch.tensor(float(inputs.tokens), device=self.args.device)
        for i, (examples, share) in enumerate(inputs.parts):
            last = i == len(inputs.parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = loss + super().training_step(model, self._tensors(examples), tokens)  # type: ignore[no-untyped-call]
            # TRL's own figure, over the micro-batch of all ranks.
            accuracy += share * self._metrics["train"]["mean_token_accuracy"][-1]
        mean = float(self.accelerator.gather(loss.detach().reshape(1)).mean())
        if not math.isfinite(mean):
            raise self._not_finite("loss")
        self.seen.append(Seen(inputs, mean, accuracy))
        if self.accelerator.is_main_process:
            self.progress.show(len(self.seen), loss=f"{mean:.3f}", accuracy=f"{accuracy:.2f}")
        return loss

    def metrics(self) -> dict[str, float]:
        """Means over all trained tokens of the last epoch, each as it was before its step."""
        last = [seen for seen in self.seen if seen.batch.epoch == self.batches[-1].epoch]
        tokens = sum(seen.batch.tokens for seen in last)
        return {
            "loss": sum(seen.loss * seen.batch.tokens for seen in last) / tokens,
            "token_accuracy": sum(seen.accuracy * seen.batch.tokens for seen in last) / tokens,
            "updates": float(len(self.seen)),
            "trained_tokens": float(sum(seen.batch.tokens for seen in self.seen)),
        }

    def _tensors(self, examples: list[Example]) -> Tensors:
        rows = [
            {"input_ids": e.token_ids, "labels": [t if m else -100 for t, m in zip(e.token_ids, e.mask, strict=True)]}
            for e in examples
        ]
        tensors: Tensors = self.data_collator(rows)
        return tensors

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The weights are in place."""

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        norm: torch.Tensor = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if not torch.isfinite(norm):
            raise self._not_finite("gradient")
        return norm

    def _not_finite(self, what: str) -> InvalidInputs:
        return InvalidInputs(
            f"the {what} of optimizer step {self.state.global_step + 1} is not finite, no checkpoint is made: "
            f"a lower sft.learning_rate may help"
        )

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: transformers guesses from a batch's tensors, and ours are examples."""
        return 0
