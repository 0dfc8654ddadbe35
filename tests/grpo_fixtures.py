"""A run's folder with a tiny base model, a first checkpoint whose adapter differs from it, and ragged batches."""

import shutil
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from steps.common.artifacts import Batch, Checkpoint
from steps.common.settings import LoraSettings
from steps.common.tables import BATCH, BATCH_COLUMNS, write
from steps.grpo.adapter import WEIGHTS
from steps.grpo.tokenizer import train_tokenizer
from steps.initialize import INITIALIZE, InitializeInputs
from steps.train import TRAIN, TrainInputs, TrainSettings

VOCABULARY = 320
LORA = LoraSettings(rank=8, alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
ITERATIONS = 3
GROUP_SIZES = (4, 4, 3, 2)
"""The second group has equal rewards: all its advantages are 0."""


def make_base(folder: Path) -> None:
    """Two layers, 320 tokens, weights large enough that log-probabilities differ."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    train_tokenizer([[{"role": "user", "content": "a b c"}]], VOCABULARY, 256).save_pretrained(folder)


def start_run(root: Path, *, seed: int = 0) -> Checkpoint:
    """A base model in `root/model` and checkpoint 0."""
    make_base(root / "model")
    return INITIALIZE.run(InitializeInputs(base_model="model", lora=LORA, seed=seed), root, "checkpoints/0000")


def disturb(root: Path, checkpoint: Checkpoint) -> None:
    """Gives the adapter weights that matter, as if it had been trained."""
    file = root / checkpoint.path / WEIGHTS
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: value + 0.2 * torch.randn(value.shape, generator=generator) for name, value in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def ragged_rows(seed: int = 0, sizes: tuple[int, ...] = GROUP_SIZES) -> list[dict[str, Any]]:
    """Groups of unequal size; a row has one to three turns, each some prompt tokens and some sampled ones.

    One trajectory consists of two sequences.
    """
    random = Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        prompt = [random.randrange(3, VOCABULARY) for _ in range(random.randint(2, 6))]
        for attempt in range(size):
            advantage = 0.0 if group == 1 else random.gauss(0, 1)
            for sequence in range(2 if (group, attempt) == (0, 1) else 1):
                row = _row(prompt, random)
                rows.append(
                    {"task_id": f"task-{group}", "attempt": attempt, "sequence": sequence, "advantage": advantage} | row
                )
    return rows


def _row(prompt: list[int], random: Random) -> dict[str, Any]:
    ids, mask, logprobs = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    for turn in range(random.randint(1, 3)):
        for sampled, count in ((False, 0 if turn == 0 else random.randint(1, 4)), (True, random.randint(1, 5))):
            ids += [random.randrange(3, VOCABULARY) for _ in range(count)]
            mask += [sampled] * count
            logprobs += [-random.uniform(2, 9) if sampled else 0.0 for _ in range(count)]
    return {"token_ids": ids, "mask": mask, "logprobs": logprobs}


def write_batch(root: Path, iteration: int, rows: list[dict[str, Any]]) -> Batch:
    """Stores rows as the batch of an iteration."""
    path = f"iterations/{iteration:04d}/batch"
    (root / path).mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame([row | {"iteration": iteration} for row in rows], schema=BATCH_COLUMNS)
    write(frame, root / path / BATCH)
    return Batch(
        path=path,
        digest=f"of batch {iteration}",
        iteration=iteration,
        sequences=len(rows),
        tokens=sum(len(row["token_ids"]) for row in rows),
        trained_tokens=sum(sum(row["mask"]) for row in rows),
        dropped={},
    )


def on_policy(root: Path, checkpoint: Checkpoint, rows: list[dict[str, Any]], temperature: float = 1.0) -> None:
    """Gives rows the log-probabilities that the checkpoint's own policy has, give or take a little."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(root / "model"), root / checkpoint.path)
    random = Random(5)
    for row in rows:
        ids = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs = [0.0, *scores.gather(1, ids[0, 1:, None])[:, 0].tolist()]
        row["logprobs"] = [
            value + random.gauss(0, 0.25) if sampled else 0.0
            for value, sampled in zip(logprobs, row["mask"], strict=True)
        ]


def train_inputs(checkpoint: Checkpoint, batch: Batch, **settings: Any) -> TrainInputs:
    """Inputs of one update, at temperature 0.7; by default the sampler's log-probabilities are the old ones."""
    plain = {"old_logprobs": "behaviour", "importance_correction": "none", "learning_rate": 0.01}
    return TrainInputs(
        checkpoint=checkpoint, batch=batch, settings=TrainSettings(**(plain | settings)), temperature=0.7
    )


def train(root: Path, checkpoint: Checkpoint, batch: Batch, **settings: Any) -> Checkpoint:
    """One update in this process."""
    path = f"checkpoints/{checkpoint.iteration + 1:04d}"
    return TRAIN.run(train_inputs(checkpoint, batch, **settings), root, path)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Checkpoint, list[Batch]]:
    """A run's folder, its checkpoint 0, and a batch for each iteration."""
    checkpoint = start_run(tmp_path)
    batches = []
    for i in range(ITERATIONS):
        rows = ragged_rows(seed=i)
        on_policy(tmp_path, checkpoint, rows, 0.7)
        batches.append(write_batch(tmp_path, i, rows))
    return tmp_path, checkpoint, batches


def copied(run: tuple[Path, Checkpoint, list[Batch]], name: str) -> Path:
    """A copy of the run's folder, beside it."""
    target = run[0].parent / f"{run[0].name}-{name}"
    shutil.copytree(run[0], target)
    return target
