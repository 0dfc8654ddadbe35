"""Tokens a second of our trainer and of stock TRL, on the same stored records: ragged, multi-turn, unequal groups.

    .venvs/train/bin/python benchmarks/trainer.py [--groups 32] [--repeats 3]

Stock TRL is given the records by its `rollout_func`; it wants groups of equal size, so short ones are filled up with
copies whose reward is None. Both take two optimizer steps on the demo's model and adapter. Stock TRL recomputes the old
log-probabilities and pads an iteration to its longest prompt and completion; we pad a micro-batch to its longest row.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import steps.grpo  # noqa: F401  # sets what libraries read when they are imported
from steps.common.artifacts import Batch, Checkpoint
from steps.common.settings import LoraSettings
from steps.common.step import Workspace
from steps.grpo.adapter import lora_config
from steps.grpo.batch import Row
from steps.grpo.model import load_base, load_tokenizer, prepare_torch
from steps.grpo.tokenizer import train_tokenizer
from steps.grpo.update import make_trainer
from steps.initialize import INITIALIZE, InitializeInputs
from steps.train import TrainInputs, TrainSettings

GROUP_SIZE = 8
VOCABULARY = 384
ROWS_PER_PASS = 32
"""Of stock TRL, whose micro-batches have a fixed number of rows."""


def make_base(folder: Path) -> None:
    """The demo's model, untrained."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    train_tokenizer([[{"role": "user", "content": "a"}]], VOCABULARY, 4096).save_pretrained(folder)


def make_rows(groups: int, long_share: float, seed: int = 0) -> list[list[Row]]:
    """Groups of 6 to 8 rows of 2 to 5 turns (some 60 to 120 tokens); a share of rows goes on for 16 to 20 turns."""
    random = Random(seed)

    def row(group: int, attempt: int) -> Row:
        turns = random.randint(16, 20) if random.random() < long_share else random.randint(2, 5)
        mask = [False] * 20 + ([False] * 20 + [True] * 3) * turns
        ids = [random.randrange(3, VOCABULARY) for _ in mask]
        return Row((f"task-{group}", attempt), ids, mask, [-5.9 * sampled for sampled in mask], random.gauss(0, 1))

    return [[row(group, attempt) for attempt in range(random.randint(6, GROUP_SIZE))] for group in range(groups)]


def ours(root: Path, checkpoint: Checkpoint, groups: list[list[Row]], old_logprobs: str) -> float:
    """Seconds of one iteration."""
    settings = {"old_logprobs": old_logprobs, "importance_correction": "none", "updates_per_iteration": 2}
    batch = Batch(path="b", digest="", iteration=0, sequences=0, tokens=0, trained_tokens=0, dropped={})
    inputs = TrainInputs(checkpoint=checkpoint, batch=batch, settings=TrainSettings.model_validate(settings))
    trainer = make_trainer(inputs, Workspace(root, "x", root / "out"), [row for group in groups for row in group])
    return timed(trainer.train)


def stock(root: Path, groups: list[list[Row]]) -> float:
    """Seconds of one iteration of TRL's own trainer."""
    filled = [row for group in groups for row in (group * 2)[:GROUP_SIZE]]
    real = [i < len(group) for group in groups for i in range(GROUP_SIZE)]

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [row.token_ids[: row.start] for row in filled],
            "completion_ids": [row.token_ids[row.start :] for row in filled],
            "logprobs": [row.logprobs[row.start :] for row in filled],
            "env_mask": [[int(sampled) for sampled in row.mask[row.start :]] for row in filled],
            "stored_reward": [row.advantage if kept else None for row, kept in zip(filled, real, strict=True)],
        }

    def stored(stored_reward: list[float | None], **_: object) -> list[float | None]:
        return stored_reward

    passes = len(filled) // ROWS_PER_PASS
    args = GRPOConfig(
        output_dir=str(root / "stock"),
        loss_type="dapo",
        temperature=1.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=passes // 2,
        steps_per_generation=passes,
        num_generations=GROUP_SIZE,
        max_steps=2,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=load_base(root, "model", "float32"),
        reward_funcs=stored,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(len(groups))]}),
        processing_class=load_tokenizer(root, "model"),
        rollout_func=rollout_func,
        peft_config=lora_config(LoraSettings()),
    )
    trainer.remove_callback(PrinterCallback)
    return timed(trainer.train)


def timed(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32, help="a multiple of 8")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    prepare_torch()
    print(
        f"{options.groups} groups, {torch.get_num_threads()} thread; processor seconds, median of {options.repeats}\n"
    )
    print("| records | tokens | trainer | old log-probs | tokens/s | ratio to stock |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_base(root / "model")
        checkpoint = INITIALIZE.run(InitializeInputs(base_model="model"), root, "checkpoints/0000")
        for name, share in (("short", 0.0), ("one in 16 long", 1 / 16)):
            groups = make_rows(options.groups, share)
            tokens = sum(len(row) for group in groups for row in group)
            runs: dict[tuple[str, str], Callable[[], float]] = {
                ("TRL", "recomputed"): lambda groups=groups: stock(root, groups),
                ("ours", "recomputed"): lambda groups=groups: ours(root, checkpoint, groups, "recompute"),
                ("ours", "stored"): lambda groups=groups: ours(root, checkpoint, groups, "behaviour"),
            }
            seconds = {key: statistics.median(run() for _ in range(options.repeats)) for key, run in runs.items()}
            for (trainer, old), taken in seconds.items():
                ratio = seconds["TRL", "recomputed"] / taken
                print(f"| {name} | {tokens} | {trainer} | {old} | {tokens / taken:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
