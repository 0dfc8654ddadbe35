"""The step `train`: exact across processes and folders, and what each setting does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_fixtures import ITERATIONS, copied, ragged_rows, run, train, train_inputs, write_batch
from safetensors.torch import load_file

from steps.common.artifacts import Batch, Checkpoint, read_manifest
from steps.common.models import PROBE, Probe
from steps.common.step import Workspace
from steps.grpo import model as grpo_model
from steps.grpo.adapter import CONFIG, WEIGHTS, load_weights
from steps.grpo.batch import read_rows
from steps.grpo.update import make_trainer
from steps.train import TrainSettings

__all__ = ["run"]
pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[1]
TWO_STEPS = {"updates_per_iteration": 2, "tokens_per_micro_batch": 64}


def optimizer_of(root: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(torch.load(root / checkpoint.path / "optimizer.pt", weights_only=True))


def in_a_process(root: Path, checkpoint: Checkpoint, batch: Batch, *launcher: str, **settings: Any) -> Checkpoint:
    """One update as the command that a container runs."""
    path = f"checkpoints/{checkpoint.iteration + 1:04d}"
    inputs = root / "inputs.json"
    inputs.write_text(train_inputs(checkpoint, batch, **settings).model_dump_json())
    command = [sys.executable, *(launcher or ("-m",)), "steps.train"]
    done = subprocess.run(
        [*command, "--root", str(root), "--path", path, "--inputs", str(inputs)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(root / path)
    assert manifest is not None
    return Checkpoint(**manifest.artifact, path=path, digest=manifest.digest)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_updates_in_as_many_processes_equal_updates_in_one(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    settings = TWO_STEPS | {
        "old_logprobs": "recompute",
        "importance_correction": "token_truncate",
        "beta": 0.02,
        "final_learning_rate": 0.001,
        "decay_iterations": 4,
    }
    other = copied(run, "other")
    here = there = first
    for batch in batches:
        here = train(root, here, batch, **settings)
        there = in_a_process(other, there, batch, **settings)
    # The digest is of every file, adapter and optimizer among them.
    assert here.digest == there.digest
    assert here.metrics == there.metrics
    assert here.step == 2 * ITERATIONS


def test_resuming_equals_never_having_stopped(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    """One trainer takes all steps of all iterations in a row, without a checkpoint between them."""
    root, first, batches = run
    checkpoint = first
    for batch in batches:
        checkpoint = train(root, checkpoint, batch, **TWO_STEPS)
    minibatches = []
    for batch in batches:
        inputs = train_inputs(first.model_copy(update={"iteration": batch.iteration}), batch, **TWO_STEPS)
        trainer = make_trainer(inputs, Workspace(root, "x", root / "out"), read_rows(root / batch.path))
        minibatches += trainer.minibatches
    trainer.minibatches, trainer.args.max_steps = minibatches, len(minibatches)
    load_weights(trainer.model, root / first.path)
    trainer.train()
    for name, value in load_file(root / checkpoint.path / WEIGHTS).items():
        live = trainer.model.get_parameter(name.replace(".weight", ".default.weight"))
        assert torch.equal(live, value), name
    stored, live_state = optimizer_of(root, checkpoint)["state"], trainer.optimizer.state_dict()["state"]
    assert stored.keys() == live_state.keys()
    for index, state in stored.items():
        assert all(torch.equal(state[key], live_state[index][key]) for key in state)


def test_the_same_inputs_make_the_same_bytes_in_any_folder(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    other = copied(run, "moved")
    here = train(root, train(root, first, batches[0]), batches[1])
    there = train(other, train(other, first, batches[0]), batches[1])
    assert here == there
    for file in (root / here.path).iterdir():
        if file.name != "manifest.json":
            assert str(root).encode() not in file.read_bytes(), file.name


def test_a_checkpoint_is_a_plain_adapter_that_names_the_base_as_the_run_does(
    run: tuple[Path, Checkpoint, list[Batch]],
) -> None:
    root, first, batches = run
    done = train(root, first, batches[0])
    config = json.loads((root / done.path / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "model"
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 16, "LORA")
    names = load_file(root / done.path / WEIGHTS).keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in names)


def test_metrics_are_there_and_finite(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    done = train(root, first, batches[0], **TWO_STEPS, beta=0.1)
    assert set(done.metrics) == {
        "loss",
        "kl",
        "approx_kl",
        "clip_fraction",
        "entropy",
        "grad_norm",
        "learning_rate",
        "importance_ratio_mean",
        "importance_ratio_max",
        "logprob_difference_mean",
        "logprob_difference_max",
        "updates",
        "updates_skipped",
        "trained_tokens",
    }
    assert all(math.isfinite(value) for value in done.metrics.values())
    assert done.metrics["trained_tokens"] == batches[0].trained_tokens
    assert done.metrics["updates"] == 2
    # The stored log-probabilities are the policy's own with Gaussian noise of 0.25.
    assert 0.1 < done.metrics["logprob_difference_mean"] < 0.35
    manifest = read_manifest(root / done.path)
    assert manifest is not None
    assert manifest.measured["tokens_per_second"] > 0


def test_the_learning_rate_is_the_iterations_own_also_when_resumed(
    run: tuple[Path, Checkpoint, list[Batch]],
) -> None:
    root, first, batches = run
    second = train(root, first, batches[0], learning_rate=0.01)
    other = copied(run, "other")
    stays = train(root, second, batches[1], learning_rate=0.01)
    changed = train(other, second, batches[1], learning_rate=0.001)
    before = load_file(root / second.path / WEIGHTS)

    def moved(folder: Path) -> float:
        after = load_file(folder / stays.path / WEIGHTS)
        return max(float((after[name] - before[name]).abs().max()) for name in before)

    assert moved(other) == pytest.approx(moved(root) / 10, rel=0.05)
    assert optimizer_of(other, changed)["param_groups"][0]["lr"] == 0.001


def test_the_optimizers_settings_are_the_iterations_own_also_when_resumed(
    run: tuple[Path, Checkpoint, list[Batch]],
) -> None:
    root, first, batches = run
    second = train(root, first, batches[0])
    third = train(root, second, batches[1], weight_decay=0.5, adam_beta1=0.5, adam_beta2=0.9)
    state = torch.load(root / third.path / "optimizer.pt", weights_only=True)
    assert {group["weight_decay"] for group in state["param_groups"]} >= {0.5}
    assert {group["betas"] for group in state["param_groups"]} == {(0.5, 0.9)}
    assert all(step["step"] > 1 for step in state["state"].values()), "its moments went on"


def test_the_schedule_is_a_line_and_then_constant() -> None:
    settings = TrainSettings(learning_rate=4e-3, final_learning_rate=1e-3, decay_iterations=30)
    assert settings.learning_rate_at(0) == 4e-3
    assert settings.learning_rate_at(10) == pytest.approx(3e-3)
    assert settings.learning_rate_at(30) == settings.learning_rate_at(99) == 1e-3
    assert TrainSettings(learning_rate=2e-3).learning_rate_at(7) == 2e-3


def test_the_probe_tells_new_previous_and_base_weights_apart(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run

    def probe_of(checkpoint: Checkpoint) -> Probe:
        return Probe.model_validate_json((root / checkpoint.path / PROBE).read_text())

    start = probe_of(first)
    assert 32 <= sum(len(s.token_ids) for s in start.sequences) <= 96
    assert all(s.previous is None and s.logprobs == pytest.approx(s.base, abs=1e-6) for s in start.sequences)
    second = train(root, first, batches[0])
    third = train(root, second, batches[1])
    probe = probe_of(third)
    assert sum(len(s.token_ids) for s in probe.sequences) <= 256
    for sequence in probe.sequences:
        assert sequence.previous is not None
        assert len(sequence.logprobs) == len(sequence.previous) == len(sequence.base) == len(sequence.token_ids) - 1
        assert max(abs(a - b) for a, b in zip(sequence.logprobs, sequence.previous, strict=True)) > 1e-4
        assert max(abs(a - b) for a, b in zip(sequence.logprobs, sequence.base, strict=True)) > 1e-3


@pytest.mark.parametrize("updated_before", [False, True])
def test_an_empty_batch_carries_the_checkpoint_over(
    run: tuple[Path, Checkpoint, list[Batch]], updated_before: bool
) -> None:
    root, checkpoint, batches = run
    if updated_before:
        checkpoint = train(root, checkpoint, batches[0])
    done = train(root, checkpoint, write_batch(root, checkpoint.iteration, []))
    assert (done.updated, done.iteration, done.step) == (False, checkpoint.iteration + 1, checkpoint.step)
    assert done.metrics == {}
    for file in (root / checkpoint.path).iterdir():
        if file.name not in (PROBE, "manifest.json"):
            assert (root / done.path / file.name).read_bytes() == file.read_bytes()
    probe = Probe.model_validate_json((root / done.path / PROBE).read_text())
    assert all(sequence.previous == sequence.logprobs for sequence in probe.sequences)
    assert train(root, done, write_batch(root, done.iteration, ragged_rows())).updated


def test_a_batch_without_an_advantage_teaches_nothing_but_the_kl(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, _ = run
    batch = write_batch(root, 0, [row | {"advantage": 0.0} for row in ragged_rows()])
    assert train(copied(run, "kl"), first, batch, beta=0.1).updated
    assert not train(root, first, batch).updated


def test_too_much_kl_skips_the_remaining_steps(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    free = train(copied(run, "free"), first, batches[0], updates_per_iteration=4, learning_rate=0.1)
    kept = train(root, first, batches[0], updates_per_iteration=4, learning_rate=0.1, max_kl=1e-3)
    assert (free.metrics["updates"], free.metrics["updates_skipped"], free.step) == (4, 0, 4)
    assert (kept.metrics["updates"], kept.metrics["updates_skipped"], kept.step) == (1, 3, 1)
    third = train(root, kept, batches[1])
    assert third.step == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_do_the_work_of_one(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    other = copied(run, "ranks")
    settings = TWO_STEPS | {"loss_type": "grpo", "learning_rate": 1e-3, "old_logprobs": "recompute"}
    alone = train(root, first, batches[0], **settings)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    both = in_a_process(other, first, batches[0], *launcher, **settings)
    assert both.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    mine, theirs = load_file(root / alone.path / WEIGHTS), load_file(other / both.path / WEIGHTS)
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=0)


def test_threads_are_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for value, expected in (("2", 2), (None, 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if value:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        grpo_model.prepare_torch()
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)
