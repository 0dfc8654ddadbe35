"""TRL's GRPOTrainer on stored records: it is handed the tensors that it would have sampled.

Everything numeric is TRL's: forward, fused LM head, losses, gradients, clipping, AdamW, checkpoints. The hooks are its
private methods, so its version is pinned, and tests compare losses and gradients with an independent formula.

One optimizer step is one item of the data loader, a list of micro-batches, so that steps may differ in size:
`gradient_accumulation_steps` is 1, and `training_step` adds the micro-batches up itself.
"""

from contextlib import nullcontext
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from steps.common.errors import InvalidInputs
from steps.common.progress import Progress
from steps.grpo.adapter import REFERENCE
from steps.grpo.batch import Minibatch, Tensors
from steps.grpo.correction import correction
from steps.grpo.meter import Meter

# TRL takes means over rows in these losses, which makes a micro-batch count by its rows.
MEANS_OVER_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})


class Drifted(Exception):
    """The policy is farther from its sampler than `max_kl`: no more steps in this iteration."""


def no_reward(completions: list[Any], **_: object) -> list[float | None]:
    """Never called: advantages are in the records. TRL wants a reward function."""
    raise NotImplementedError


class RecordTrainer(GRPOTrainer):
    """Trains on minibatches of stored records, one optimizer step each."""

    model: PeftModel
    args: GRPOConfig
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        args: GRPOConfig,
        lora: LoraConfig,
        minibatches: list[Minibatch],
        *,
        old_logprobs: str,
        max_kl: float | None = None,
    ) -> None:
        corrects = args.vllm_importance_sampling_correction
        super().__init__(
            model=model,
            reward_funcs=no_reward,
            args=args,
            # Its rows are never read.
            train_dataset=Dataset.from_dict({"prompt": ["", ""]}),
            processing_class=tokenizer,
            peft_config=lora,
        )
        # Set after the constructor it builds no engine; the loss reads it to apply `importance_sampling_ratio`.
        self.use_vllm = corrects
        self.minibatches = minibatches
        self.old_logprobs, self.max_kl = old_logprobs, max_kl
        self.meter = Meter(self.accelerator)
        self.progress, self.done = Progress(sum(map(len, minibatches)), "micro-batches"), 0
        self.scored = False
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The minibatches in their order. Not prepared by accelerate: each rank was dealt its own."""
        return DataLoader(cast(Any, self.minibatches), batch_size=1, collate_fn=lambda items: items[0])

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Adds up the gradients of a minibatch, `inputs`. Raises `Drifted` where the step must not be taken."""
        if not self.scored:
            self._score()
        loss = torch.zeros((), device=self.args.device)
        for i, micro_batch in enumerate(inputs):
            last = i == len(inputs) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = loss + super().training_step(model, micro_batch, num_items_in_batch)  # type: ignore[no-untyped-call]
            self.done += 1
            if self.accelerator.is_main_process:
                self.progress.show(self.done)
        taken = self.meter.close(loss)
        if not taken.finite:
            raise self._not_finite("loss")
        if self.max_kl is not None and self.meter.steps > 1 and taken.approx_kl > self.max_kl:
            self.meter.discard()
            raise Drifted
        return loss

    def compute_loss(self, model: torch.nn.Module, inputs: Tensors, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss, scaled to the micro-batch's share of its minibatch."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        logps, entropies = self._seen
        self.meter.observe(inputs, logps, entropies, self._clipped())
        scaled: torch.Tensor = loss * inputs["rows_scale"] if self.loss_type in MEANS_OVER_ROWS else loss
        return scaled

    def _prepare_inputs(self, inputs: Tensors) -> Tensors:
        return {name: tensor.to(self.accelerator.device) for name, tensor in inputs.items()}

    def _score(self) -> None:
        """Log-probabilities that stay fixed over the iteration's steps: of the policy as it starts, and its reference.

        The reference is a second adapter where there is one (`adapter.add_reference`), else the base model.
        """
        reference = REFERENCE if REFERENCE in self.accelerator.unwrap_model(self.model).peft_config else None
        needs_old = self.old_logprobs == "recompute" or self.use_vllm
        for micro_batch in (micro_batch for minibatch in self.minibatches for micro_batch in minibatch):
            if self.old_logprobs == "behaviour":
                micro_batch["old_per_token_logps"] = micro_batch["sampling_per_token_logps"]
            if needs_old:
                start = self._score_micro_batch(micro_batch)
                if self.old_logprobs == "recompute":
                    micro_batch["old_per_token_logps"] = start
                if self.use_vllm:
                    micro_batch["importance_sampling_ratio"] = correction(self.args, start, micro_batch)
            if self.beta:
                with use_adapter(self.accelerator.unwrap_model(self.model), reference):
                    micro_batch["ref_per_token_logps"] = self._score_micro_batch(micro_batch)
        self.scored = True

    def _score_micro_batch(self, micro_batch: Tensors) -> torch.Tensor:
        inputs = self._prepare_inputs(micro_batch)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        present = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps: torch.Tensor
        with torch.no_grad(), disable_gradient_checkpointing(cast(Any, self.model)):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, present, inputs["completion_ids"].size(1)
            )
        return logps

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._seen = result[:2]
        return result

    def _clipped(self) -> float:
        """The fraction that TRL counted as clipped in the last loss; 0 for the losses that clip nothing."""
        counted = self._metrics["train"].get("clip_ratio/region_mean") or self._metrics["train"].get("cispo_clip_ratio")
        return counted[-1] if counted else 0.0

    def _not_finite(self, what: str) -> InvalidInputs:
        return InvalidInputs(
            f"the {what} of optimizer step {self.state.global_step + 1} is not finite, no checkpoint is made: "
            f"a lower learning rate or clipped ratios may help"
        )

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        norm: torch.Tensor = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if not torch.isfinite(norm):
            raise self._not_finite("gradient")
        self.meter.grad_norms.append(float(norm))
        return norm

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The weights are in place; transformers would take a reference beside them for those to be trained."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores what they remember, and not what they are set to: of rate, decay and betas this update's count."""
        wanted = [{**group} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
        for group, settings in zip(self.optimizer.param_groups, wanted, strict=True):
            del settings["params"]
            group.update(settings, lr=self.args.learning_rate, initial_lr=self.args.learning_rate)
        self.lr_scheduler.base_lrs = [self.args.learning_rate] * len(self.lr_scheduler.base_lrs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: transformers guesses from a batch's tensors, and ours are lists of them."""
        return 0
