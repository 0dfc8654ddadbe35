"""The steps `initialize` and `train`: exact across processes and folders; what goes wrong leaves no checkpoint."""

import json
import math
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from grpo_fixtures import LORA, make_base, on_policy, ragged_rows, start_run, train, train_inputs, write_batch
from safetensors.torch import load_file

from steps.common.artifacts import Batch, Checkpoint, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.models import PROBE, Probe
from steps.common.step import Workspace
from steps.grpo import model as grpo_model
from steps.grpo.adapter import CONFIG, WEIGHTS, load_weights
from steps.grpo.batch import read_rows
from steps.grpo.update import make_trainer
from steps.initialize import INITIALIZE, InitializeInputs
from steps.train import TrainSettings

pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[1]
ITERATIONS = 3
TWO_STEPS = {"updates_per_iteration": 2, "tokens_per_micro_batch": 64}


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


def optimizer_of(root: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    return dict(torch.load(root / checkpoint.path / "optimizer.pt", weights_only=True))


def copied(run: tuple[Path, Checkpoint, list[Batch]], name: str) -> Path:
    target = run[0].parent / f"{run[0].name}-{name}"
    shutil.copytree(run[0], target)
    return target


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


def test_without_the_optimizer_training_does_not_go_on(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    second = train(root, first, batches[0])
    (root / second.path / "optimizer.pt").unlink()
    with pytest.raises(CorruptArtifact, match=r"optimizer\.pt is missing"):
        train(root, second, batches[1])
    assert not (root / "checkpoints/0002").exists()


def spoil_logprob(rows: list[dict[str, Any]]) -> None:
    row = rows[3]
    row["logprobs"][row["mask"].index(True)] = float("nan")


def spoil_advantage(rows: list[dict[str, Any]]) -> None:
    rows[3]["advantage"] = float("inf")


def explode(rows: list[dict[str, Any]]) -> None:
    """So unlikely for the sampler that the ratio overflows, and too good for the clip."""
    for row in rows:
        row["advantage"] = -1.0
        row["logprobs"] = [-1e4 * sampled for sampled in row["mask"]]


def unknown_token(rows: list[dict[str, Any]]) -> None:
    rows[3]["token_ids"][0] = 5000


def no_prompt(rows: list[dict[str, Any]]) -> None:
    rows[3]["mask"][0] = True


def unequal(rows: list[dict[str, Any]]) -> None:
    rows[3]["logprobs"].append(0.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_logprob, "task-0, attempt 2 has a sampled token without a finite log-probability"),
        (spoil_advantage, "task-0, attempt 2 has advantage inf"),
        (explode, "the loss of optimizer step 1 is not finite"),
        (unknown_token, "holds token 5000, but the base model knows 320 tokens"),
        (no_prompt, "starts with a sampled token"),
        (unequal, "unequal lengths"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_trained_on_leaves_no_checkpoint(
    run: tuple[Path, Checkpoint, list[Batch]], spoil: Any, message: str
) -> None:
    root, first, _ = run
    rows = ragged_rows()
    spoil(rows)
    with pytest.raises(InvalidInputs, match=message):
        train(root, first, write_batch(root, 0, rows))
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["0000"]


def test_a_metric_that_is_not_finite_leaves_no_checkpoint(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    """One token's ratio overflows even float64, while its sequence's ratio is clipped."""
    root, first, _ = run
    rows = ragged_rows()
    row = max(rows, key=lambda row: sum(row["mask"]))
    row["advantage"], row["logprobs"][row["mask"].index(True)] = 1.0, -85.0 * sum(row["mask"])
    with pytest.raises(InvalidInputs, match="importance_ratio_max of this update is not finite"):
        train(root, first, write_batch(root, 0, rows), loss_type="grpo", importance_sampling_level="sequence")
    assert not (root / "checkpoints/0001").exists()


def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    workspace = Workspace(root, "x", root / "out")
    trainer = make_trainer(train_inputs(first, batches[0]), workspace, read_rows(root / batches[0].path))
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(InvalidInputs, match="the gradient of optimizer step 1 is not finite"):
        trainer.train()


def test_a_collapsed_entropy_leaves_no_checkpoint(run: tuple[Path, Checkpoint, list[Batch]]) -> None:
    root, first, batches = run
    with pytest.raises(InvalidInputs, match="below min_entropy 50"):
        train(root, first, batches[0], min_entropy=50)


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


def initialize(root: Path, base_model: str, **lora: Any) -> Checkpoint:
    inputs = InitializeInputs(base_model=base_model, lora=LORA.model_copy(update=lora))
    return INITIALIZE.run(inputs, root, "checkpoints/0000")


def test_a_missing_base_model_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputs, match="there is no base model '/no/such/folder'"):
        initialize(tmp_path, "/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputs, match=r"empty holds no model"):
        initialize(tmp_path, "empty")
    with pytest.raises(InvalidInputs, match="there is no base model 'a/b/c'"):
        initialize(tmp_path, "a/b/c")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it retries for half a minute
    with pytest.raises(InvalidInputs, match="the hub can't be reached: set base_model to a folder"):
        initialize(tmp_path, "some/model")
    assert not (tmp_path / "checkpoints/0000").exists()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated and for an unknown model."""

    def do_HEAD(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_a_gated_model_asks_for_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        template = "" if name == "ENDPOINT" else "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", endpoint + template)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InvalidInputs, match="some/gated is gated and HF_TOKEN is not set"):
        initialize(tmp_path, "some/gated")
    with pytest.raises(InvalidInputs, match="the hub has no model some/typo"):
        initialize(tmp_path, "some/typo")
    server.shutdown()
    server.server_close()


def test_an_adapter_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    make_base(tmp_path / "model")
    with pytest.raises(InvalidInputs, match="target_modules does not fit the base model"):
        initialize(tmp_path, "model", target_modules=["no_such_module"])
    with pytest.raises(InvalidInputs, match="lm_head"):
        initialize(tmp_path, "model", target_modules=["lm_head"])


def test_the_first_adapter_is_the_seeds(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    digests = [start_run(root, seed=seed).digest for root, seed in zip(runs, (0, 0, 1), strict=True)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, "cispo needs epsilon_high"),
        ({"loss_type": "dr_grpo"}, "dr_grpo needs max_completion_length"),
        ({"old_logprobs": "behaviour"}, "leaves nothing to correct"),
        ({"loss_type": "vespo", "importance_correction": "sequence_mask"}, "vespo takes"),
        ({"final_learning_rate": 0.1}, "go together"),
        ({"loss_type": "bnpo"}, "Input should be"),
        ({"epsilon": -0.1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)


def test_threads_are_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for value, expected in (("2", 2), (None, 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if value:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        grpo_model.prepare_torch()
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)
