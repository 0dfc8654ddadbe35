"""The train step on a GPU: tokens a second, peak memory, agreement with the CPU, for a random 0.5 B Qwen3.

    .venvs/train/bin/python benchmarks/gpu_update.py                        # a few minutes, most of them the CPU's
    .venvs/train/bin/python benchmarks/gpu_update.py --device cpu --tiny    # the same without a GPU, in a minute

Every update is the real step, `python -m steps.train`, in a process of its own, from stored records. Agreement is that
of a small batch's update: loss, gradient norm, the cosine of the two gradients (AdamW's first moment), and the probe's
log-probabilities.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import steps.grpo  # noqa: F401  # sets what libraries read when they are imported
from steps.common.artifacts import Batch, Checkpoint, Manifest, read_manifest
from steps.common.models import PROBE, Probe
from steps.common.tables import BATCH, BATCH_COLUMNS, write
from steps.grpo.tokenizer import train_tokenizer
from steps.initialize import INITIALIZE, InitializeInputs
from steps.train import TrainInputs, TrainSettings

REPOSITORY = Path(__file__).parents[1]
# Qwen3-0.6B has 28 layers; 20 of them and its embeddings are 0.47 B parameters.
HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_base(folder: Path, shape: dict[str, int]) -> int:
    """Writes a random model in bfloat16, so that every dtype starts from the same weights; returns its parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    train_tokenizer([[{"role": "user", "content": "a"}]], 384, 8192).save_pretrained(folder)
    return model.num_parameters()


def make_batch(root: Path, name: str, sequences: int, turns: tuple[int, int], vocabulary: int) -> Batch:
    """Groups of 8 ragged multi-turn rows: a prompt of 200 tokens, turns of 60 observed and 40 sampled ones."""
    random = Random(name)
    rows = []
    for i in range(sequences):
        mask = [False] * 200 + ([False] * 60 + [True] * 40) * random.randint(*turns)
        ids = [random.randrange(3, vocabulary) for _ in mask]
        logprobs = [-torch.tensor(vocabulary).log().item() * sampled for sampled in mask]
        advantage = random.gauss(0, 1)
        row = {"iteration": 0, "task_id": f"task-{i // 8}", "attempt": i % 8, "sequence": 0, "token_ids": ids}
        rows.append(row | {"mask": mask, "logprobs": logprobs, "advantage": advantage})
    (root / name).mkdir()
    write(pl.DataFrame(rows, schema=BATCH_COLUMNS), root / name / BATCH)
    tokens, trained = (sum(len(row["mask"]) for row in rows), sum(sum(row["mask"]) for row in rows))
    return Batch(
        path=name, digest=name, iteration=0, sequences=sequences, tokens=tokens, trained_tokens=trained, dropped={}
    )


def update(root: Path, name: str, inputs: TrainInputs, device: str) -> Manifest:
    """One `python -m steps.train`; returns its manifest."""
    file = root / f"{name}.json"
    file.write_text(inputs.model_dump_json())
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        "PYTHONPATH": str(REPOSITORY),
        **hidden,
    }
    command = [sys.executable, "-m", "steps.train", "--root", str(root), "--path", name, "--inputs", str(file)]
    started = time.monotonic()
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment, timeout=400)
    print(f"{name}: {time.monotonic() - started:.0f} s with all imports", flush=True)
    manifest = read_manifest(root / name)
    assert manifest is not None
    return manifest


def gradient(root: Path, name: str) -> torch.Tensor:
    """AdamW's first moment after one step is the gradient times 1 - beta1."""
    state = torch.load(root / name / "optimizer.pt", weights_only=True, map_location="cpu")["state"]
    return torch.cat([value["exp_avg"].flatten().double() for _, value in sorted(state.items())])


def probe_difference(root: Path, name: str, other: str) -> float:
    """Mean |difference| of the two checkpoints' log-probabilities, nats."""
    values = [
        [x for s in Probe.model_validate_json((root / n / PROBE).read_text()).sequences for x in s.logprobs]
        for n in (name, other)
    ]
    return sum(abs(a - b) for a, b in zip(*values, strict=True)) / len(values[0])


def compare(root: Path, name: str, manifest: Manifest, expected: Manifest) -> dict[str, Any]:
    mine, theirs = gradient(root, name), gradient(root, "cpu-float32")
    ours, reference = manifest.artifact["metrics"], expected.artifact["metrics"]
    return {
        "loss": f"{ours['loss']:+.6f} ({reference['loss']:+.6f})",
        "gradient norm": f"{ours['grad_norm']:.5f} ({reference['grad_norm']:.5f})",
        "cosine": f"{torch.nn.functional.cosine_similarity(mine, theirs, dim=0):.6f}",
        "log-probabilities": f"{probe_difference(root, name, 'cpu-float32'):.2e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the demo's model and less data")
    parser.add_argument("--micro-batch", type=int, default=32_768, help="tokens of one pass of the large batch")
    options = parser.parse_args()
    shape, device = TINY if options.tiny else HALF_BILLION, options.device
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parameters = make_base(root / "model", shape)
        checkpoint = INITIALIZE.run(InitializeInputs(base_model="model"), root, "checkpoints/0000")
        report(root, checkpoint, parameters, shape["vocab_size"], device, options)


def report(
    root: Path, checkpoint: Checkpoint, parameters: int, vocabulary: int, device: str, options: argparse.Namespace
) -> None:
    """Runs the updates and prints one table for agreement, one for speed."""
    small = make_batch(root, "small", 8, (1, 2), vocabulary)
    large = make_batch(root, "large", 16 if options.tiny else 128, (4, 16), vocabulary)

    def inputs(batch: Batch, dtype: str, **settings: Any) -> TrainInputs:
        chosen = {"old_logprobs": "behaviour", "importance_correction": "none"} | settings
        fields = {"checkpoint": checkpoint, "batch": batch, "settings": TrainSettings(**chosen), "dtype": dtype}
        return TrainInputs.model_validate(fields)

    expected = update(root, "cpu-float32", inputs(small, "float32"), "cpu")
    agreement = {
        dtype: compare(root, name, update(root, name, inputs(small, dtype), device), expected)
        for dtype in ("float32", "bfloat16")
        for name in [f"{device}-{dtype}-again"]
    }
    budget = {"tokens_per_micro_batch": options.micro_batch, "updates_per_iteration": 2}
    fast = update(root, "large-plain", inputs(large, "bfloat16", **budget), device)
    checkpointed = inputs(large, "bfloat16", gradient_checkpointing=True, **budget)
    lean = update(root, "large-checkpointing", checkpointed, device)

    print(f"\n{parameters / 1e6:.1f} M parameters, LoRA of rank 16, {device}; in brackets: float32 on the CPU")
    print("| dtype | loss | gradient norm | cosine of gradients | mean difference of log-probabilities |")
    print("|---|---|---|---|---|")
    for dtype, values in agreement.items():
        print(f"| {dtype} | {' | '.join(values.values())} |")
    print(f"\nbfloat16, {large.sequences} sequences, {large.tokens} tokens, two optimizer steps")
    print("| | tokens/s | peak GPU memory, GiB | other seconds |\n|---|---|---|---|")
    for name, manifest in (("plain", fast), ("gradient checkpointing", lean)):
        measured = manifest.measured
        peak = measured.get("peak_gpu_gib", float("nan"))
        print(f"| {name} | {measured['tokens_per_second']:,.0f} | {peak:.1f} | {measured['other_seconds']:.1f} |")
    print(json.dumps(fast.versions))


if __name__ == "__main__":
    main()
