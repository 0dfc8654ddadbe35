"""The work of `steps.train`: resume, update, and write all that the next update needs, byte for byte the same."""

import math
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOConfig

from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.step import Workspace
from steps.grpo import probe
from steps.grpo.adapter import REFERENCE, add_reference, load_weights, read_config, save_adapter
from steps.grpo.batch import Row, check_vocabulary, micro_batches, minibatches, read_rows
from steps.grpo.model import leave_unless_first, load_base, load_tokenizer, prepare_torch, trainer_arguments
from steps.grpo.trainer import Drifted, RecordTrainer

if TYPE_CHECKING:
    from steps.train import TrainInputs

NEEDED_TO_RESUME = ("optimizer.pt", "scheduler.pt", "trainer_state.json")


def update(inputs: "TrainInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes checkpoint i+1 from checkpoint i and batch i.

    With nothing to learn it is a copy. Raises `InvalidInputs` for what can't be trained on and an update gone wrong.
    """
    prepare_torch()
    folder = workspace.root / inputs.checkpoint.path
    rows = read_rows(workspace.root / inputs.batch.path)
    if not rows or not (inputs.settings.beta or any(row.advantage for row in rows)):
        return _carry_over(inputs.checkpoint, folder, workspace.out)
    _check_resumable(inputs.checkpoint, folder)
    started = time.monotonic()
    trainer = make_trainer(inputs, workspace, rows)
    load_weights(trainer.model, folder)
    if inputs.settings.beta:
        add_reference(trainer.model, folder)
    sequences = probe.telling_sequences(rows)
    before = probe.logprobs(trainer.model, sequences)
    updating = time.monotonic()
    metrics = _take_steps(trainer, inputs, folder)
    workspace.measured["update_seconds"] = seconds = time.monotonic() - updating
    workspace.measured["tokens_per_second"] = sum(map(len, rows)) / seconds
    if torch.cuda.is_available():
        workspace.measured["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    leave_unless_first()
    with trainer.model.disable_adapter():
        base = probe.logprobs(trainer.model, sequences)
    after = probe.logprobs(trainer.model, sequences)
    probe.write_probe(workspace.out, inputs.dtype, sequences, after, before, base)
    _save(trainer, inputs.checkpoint.base_model, workspace.out)
    if (folder / REFERENCE).is_dir():
        shutil.copytree(folder / REFERENCE, workspace.out / REFERENCE)
    workspace.measured["other_seconds"] = time.monotonic() - started - seconds
    return _fields(inputs.checkpoint, trainer.state.global_step, updated=True, metrics=metrics)


def make_trainer(inputs: "TrainInputs", workspace: Workspace, rows: list[Row]) -> RecordTrainer:
    """The trainer with its work dealt out; its adapter is not loaded yet."""
    settings, root, base_model = inputs.settings, workspace.root, inputs.checkpoint.base_model
    base = load_base(root, base_model, inputs.dtype)
    check_vocabulary(rows, base.config.get_text_config().vocab_size)
    parts = minibatches(rows, settings.updates_per_iteration, f"{inputs.seed}-{inputs.checkpoint.iteration}")
    args = _arguments(inputs, workspace.out, len(parts))
    rank, world = args.process_index, args.world_size
    return RecordTrainer(
        base,
        load_tokenizer(root, base_model),
        args,
        read_config(root / inputs.checkpoint.path),
        [micro_batches(part, settings.tokens_per_micro_batch, rank, world) for part in parts],
        old_logprobs=settings.old_logprobs,
        max_kl=settings.max_kl,
    )


def _arguments(inputs: "TrainInputs", out: Path, steps: int) -> GRPOConfig:
    settings = inputs.settings
    return GRPOConfig(
        output_dir=str(out),
        loss_type=settings.loss_type,
        importance_sampling_level=settings.importance_sampling_level,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
        beta=settings.beta,
        use_bias_correction_kl=settings.use_bias_correction_kl,
        temperature=inputs.temperature,
        max_completion_length=settings.max_completion_length,
        vllm_importance_sampling_correction=settings.importance_correction != "none",
        vllm_importance_sampling_mode=(
            "token_truncate" if settings.importance_correction == "none" else settings.importance_correction
        ),
        vllm_importance_sampling_clip_max=settings.correction_max,
        vllm_importance_sampling_clip_min=settings.correction_min,
        learning_rate=settings.learning_rate_at(inputs.checkpoint.iteration),
        lr_scheduler_type="constant",
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        gradient_checkpointing=settings.gradient_checkpointing,
        disable_dropout=True,
        max_steps=inputs.checkpoint.step + steps,
        # Only validated: a minibatch holds what it holds.
        per_device_train_batch_size=2,
        num_generations=2,
        seed=inputs.seed,
        **trainer_arguments(inputs.dtype),
    )


def _take_steps(trainer: RecordTrainer, inputs: "TrainInputs", folder: Path) -> dict[str, float]:
    """Trains, and returns the metrics. Raises `InvalidInputs` where the entropy collapsed or a metric is not finite."""
    with suppress(Drifted):
        trainer.train(resume_from_checkpoint=str(folder) if inputs.checkpoint.step else None)
    meter = trainer.meter
    lowest, last = inputs.settings.min_entropy, meter.minibatches[-1].mean("entropy")
    if last < lowest:
        raise InvalidInputs(
            f"the policy's entropy fell to {last:.4g} nats a token, below min_entropy {lowest:g}; no checkpoint: "
            f"go back to an earlier one with a lower learning rate, or allow it"
        )
    metrics = meter.metrics()
    if not trainer.beta:
        del metrics["kl"]
    skipped = len(trainer.minibatches) - meter.steps
    metrics |= {"learning_rate": trainer.args.learning_rate, "updates_skipped": float(skipped)}
    if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise InvalidInputs(
            f"{', '.join(wrong)} of this update is not finite, no checkpoint is made: "
            f"do the batch's log-probabilities come from another model?"
        )
    return metrics


def _check_resumable(checkpoint: Checkpoint, folder: Path) -> None:
    missing = [name for name in NEEDED_TO_RESUME if not (folder / name).is_file()]
    if checkpoint.step and missing:
        raise CorruptArtifact(
            f"{folder / missing[0]} is missing, and training can't go on without it; restore {folder} from a backup"
        )


def _save(trainer: RecordTrainer, base_model: str, out: Path) -> None:
    """Adapter, optimizer, scheduler, chance and counters, as transformers and PEFT read them."""
    save_adapter(trainer.model, base_model, out)
    trainer._save_optimizer_and_scheduler(str(out))
    trainer._save_rng_state(str(out))
    # Its log has times in it; the metrics are the artifact's.
    trainer.state.log_history = []
    trainer.state.save_to_json(str(out / "trainer_state.json"))


def _carry_over(checkpoint: Checkpoint, folder: Path, out: Path) -> dict[str, Any]:
    leave_unless_first()
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(layout.MANIFEST), dirs_exist_ok=True)
    probe.repeat_probe(out)
    return _fields(checkpoint, checkpoint.step, updated=False, metrics={})


def _fields(checkpoint: Checkpoint, step: int, *, updated: bool, metrics: dict[str, float]) -> dict[str, Any]:
    return {
        "iteration": checkpoint.iteration + 1,
        "base_model": checkpoint.base_model,
        "base_digest": checkpoint.base_digest,
        "step": step,
        "updated": updated,
        "metrics": metrics,
    }
