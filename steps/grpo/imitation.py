"""The work of `steps.sft`: TRL's SFTTrainer on examples, and the checkpoint that a run goes on from."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from steps.common.step import Workspace
from steps.grpo.adapter import REFERENCE, save_adapter
from steps.grpo.batch import Example, check_vocabulary, deal
from steps.grpo.examples import read_examples
from steps.grpo.halfway import Halfway
from steps.grpo.imitation_trainer import Batch, ImitationTrainer
from steps.grpo.model import leave_unless_first, load_base, load_tokenizer, prepare_torch, trainer_arguments
from steps.grpo.probe import imitated_sequences, logprobs, write_probe
from steps.grpo.start import first_policy

if TYPE_CHECKING:
    from steps.sft import SftInputs


def imitate(inputs: "SftInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes checkpoint 0, its adapter also as the reference. Raises `InvalidInputs` for what can't be learnt from."""
    prepare_torch()
    started = time.monotonic()
    tokenizer = load_tokenizer(workspace.root, inputs.base_model)
    folder = workspace.root / inputs.demonstrations.path
    examples, dropped = read_examples(folder, tokenizer, inputs.base_model, inputs.settings.max_tokens)
    print(f"imitates {len(examples)} sequences; left out: {_counted(dropped)}", flush=True)
    trainer = make_trainer(inputs, workspace, tokenizer, examples)
    halfway = Halfway(trainer, workspace, inputs.fingerprint())
    trainer.add_callback(halfway)
    before, training = halfway.go_on(), time.monotonic()
    to_come = trainer.batches[len(trainer.seen) :]
    trainer.train(resume_from_checkpoint=before)
    workspace.measured["update_seconds"] = seconds = time.monotonic() - training
    tokens = sum(len(example) for batch in to_come for part, _ in batch.parts for example in part)
    workspace.measured["tokens_per_second"] = tokens / seconds
    leave_unless_first()
    _save(trainer.model, inputs, examples, workspace.out)
    workspace.measured["other_seconds"] = time.monotonic() - started - seconds
    return {
        "iteration": 0,
        "base_model": inputs.base_model,
        "base_digest": inputs.base_digest,
        "step": 0,
        "updated": True,
        "metrics": {**trainer.metrics(), **{f"dropped_{reason}": float(n) for reason, n in sorted(dropped.items())}},
    }


def make_trainer(
    inputs: "SftInputs", workspace: Workspace, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> ImitationTrainer:
    """The trainer with its work dealt out, on the policy that the run would have started from without examples."""
    settings = inputs.settings
    base = load_base(workspace.root, inputs.base_model, inputs.dtype)
    check_vocabulary(examples, base.config.get_text_config().vocab_size)
    args = SFTConfig(
        output_dir=str(workspace.out),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=inputs.seed,
        **trainer_arguments(inputs.dtype),
    )
    batches = list(_batches(examples, inputs, args.process_index, args.world_size))
    args.max_steps = len(batches)
    model = first_policy(base, inputs, workspace.root)
    return ImitationTrainer(model, tokenizer, args, batches, warmup=round(settings.warmup * len(batches)))


def _batches(examples: Sequence[Example], inputs: "SftInputs", rank: int, world: int) -> Iterator[Batch]:
    """Every epoch shuffled anew; the sequences of an example stay together."""
    whole: dict[tuple[str, int], list[Example]] = {}
    for example in examples:
        whole.setdefault(example.trajectory, []).append(example)
    size = inputs.settings.batch_size
    for epoch in range(inputs.settings.epochs):
        order = Random(f"sft|{inputs.seed}|{epoch}").sample(list(whole), len(whole))
        for first in range(0, len(order), size):
            rows = [example for key in order[first : first + size] for example in whole[key]]
            tokens = sum(map(_trained, rows))
            dealt = deal(rows, inputs.settings.tokens_per_micro_batch, rank, world)
            yield Batch(epoch, [(mine, sum(map(_trained, part)) / tokens) for part, mine in dealt], tokens)


def _counted(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"


def _trained(example: Example) -> int:
    """Tokens that the loss counts: the first has nothing before it."""
    return sum(example.mask[1:])


def _save(model: PeftModel, inputs: "SftInputs", examples: Sequence[Example], out: Path) -> None:
    sequences = imitated_sequences(examples)
    with model.disable_adapter():
        base = logprobs(model, sequences)
    write_probe(out, inputs.dtype, sequences, logprobs(model, sequences), None, base)
    for folder in (out, out / REFERENCE):
        save_adapter(model, inputs.base_model, folder)
