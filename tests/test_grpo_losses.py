"""Losses and gradients of the trainer against formulas written here, in float64 from each paper."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_fixtures import disturb, on_policy, ragged_rows, start_run, train_inputs, write_batch
from peft import PeftModel
from transformers import Qwen3ForCausalLM

from steps.common.artifacts import Checkpoint
from steps.common.step import Workspace
from steps.grpo.adapter import load_weights
from steps.grpo.batch import read_rows
from steps.grpo.model import prepare_torch
from steps.grpo.trainer import RecordTrainer
from steps.grpo.update import make_trainer

pytestmark = pytest.mark.train

TEMPERATURE = 0.7
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint, Rows]:
    """A run whose adapter differs from its base, and rows that its policy could have sampled."""
    root = tmp_path_factory.mktemp("run")
    checkpoint = start_run(root)
    disturb(root, checkpoint)
    rows = ragged_rows()
    on_policy(root, checkpoint, rows, TEMPERATURE)
    return root, checkpoint, rows


def make(stored: tuple[Path, Checkpoint, Rows], **settings: Any) -> RecordTrainer:
    """The trainer with the checkpoint's weights, one minibatch to do."""
    root, checkpoint, rows = stored
    prepare_torch()
    batch = write_batch(root, 0, rows)
    inputs = train_inputs(checkpoint, batch, **settings)
    workspace = Workspace(root, "checkpoints/0001", root / "out")
    trainer = make_trainer(inputs, workspace, read_rows(root / batch.path))
    load_weights(trainer.model, root / checkpoint.path)
    trainer.current_gradient_accumulation_steps = 1  # as transformers' loop sets it
    return trainer


def loss_and_gradient(trainer: RecordTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    loss = trainer.training_step(trainer.model, trainer.minibatches[0])
    return float(loss), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def double_model(root: Path, checkpoint: Checkpoint) -> PeftModel:
    base = Qwen3ForCausalLM.from_pretrained(root / "model", dtype=torch.float64)
    return PeftModel.from_pretrained(base, root / checkpoint.path, is_trainable=True).double()


def token_logprobs(model: PeftModel, row: dict[str, Any]) -> torch.Tensor:
    """float64, of the sampled tokens only, from a forward pass over this row alone."""
    ids = torch.tensor([row["token_ids"]])
    logits = model(input_ids=ids).logits[0, :-1].double() / TEMPERATURE
    chosen = logits.gather(1, ids[0, 1:, None])[:, 0] - logits.logsumexp(-1)
    return chosen[torch.tensor(row["mask"][1:])]


def expected_loss(model: PeftModel, rows: Rows, s: dict[str, Any]) -> torch.Tensor:
    """The loss of all rows as one minibatch, in float64, one row after the other."""
    kind, low, high = s["loss_type"], s.get("epsilon", 0.2), s.get("epsilon_high") or s.get("epsilon", 0.2)
    sums, means, tokens = [], [], 0
    for row in rows:
        advantage = row["advantage"]
        behaviour = torch.tensor(row["logprobs"], dtype=torch.float32).double()[torch.tensor(row["mask"])]
        logp = token_logprobs(model, row)
        start = logp.detach()
        old = {"behaviour": behaviour, "recompute": start, "current": start}[s["old_logprobs"]]
        change = logp - old
        ratio = (
            change.exp() if s.get("importance_sampling_level") != "sequence" else change.mean().exp().expand_as(change)
        )
        weight = correction_of(start - behaviour, s)
        if kind == "cispo":
            loss = -ratio.detach().clamp(max=high) * advantage * logp
        elif kind == "sapo":
            slope = 1.0 if advantage > 0 else 1.05
            loss = -torch.sigmoid(slope * (ratio - 1)) * 4 / slope * advantage
        elif kind == "vespo":
            k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            log_weight = (change.sum() + weight.log().sum()).detach()
            loss = -torch.exp(lam + k * log_weight - lam * log_weight.exp()) * advantage * logp
            weight = torch.ones_like(weight)
        else:
            unclipped = ratio.clamp(max=s["delta"]) if "delta" in s else ratio
            loss = -torch.minimum(unclipped * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        loss = loss * weight
        if beta := s.get("beta"):
            with model.disable_adapter(), torch.no_grad():
                reference = token_logprobs(model, row)
            kl = (reference - logp).exp() - (reference - logp) - 1
            loss = loss + beta * kl * (ratio if s.get("use_bias_correction_kl", True) else 1)
        sums.append(loss.sum())
        means.append(loss.mean())
        tokens += len(loss)
    if kind in ("grpo", "sapo"):
        return torch.stack(means).mean()
    if kind == "luspo":
        return torch.stack(sums).mean()
    if kind == "dr_grpo":
        return torch.stack(sums).sum() / (len(rows) * s["max_completion_length"])
    return torch.stack(sums).sum() / tokens


def correction_of(difference: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
    mode = s["importance_correction"]
    if mode == "none":
        return torch.ones_like(difference)
    ratio = difference.exp() if mode.startswith("token") else difference.sum().exp().expand_as(difference)
    low, high = s.get("correction_min") or 0.0, s.get("correction_max", 3.0)
    inside = ((ratio >= low) & (ratio <= high)).double()
    return ratio.clamp(low, high) if mode.endswith("truncate") else ratio * inside


BEHAVIOUR = {"old_logprobs": "behaviour", "importance_correction": "none"}
RECOMPUTE = {"old_logprobs": "recompute", "importance_correction": "none"}
CURRENT = {"old_logprobs": "current", "importance_correction": "none"}
BOUNDS = {"correction_max": 1.3, "correction_min": 0.7}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 32},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "two-sided": {"loss_type": "grpo", "delta": 1.3},
    "kl": {"loss_type": "dapo", "beta": 0.05},
    "plain-kl": {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
}
CORRECTED = {
    mode: RECOMPUTE | BOUNDS | {"importance_correction": mode}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}
CASES = {
    **{f"{name}-behaviour": loss | BEHAVIOUR for name, loss in LOSSES.items()},
    **{f"{name}-token_truncate": loss | CORRECTED["token_truncate"] for name, loss in LOSSES.items()},
    **{f"dapo-{mode}": LOSSES["dapo"] | settings for mode, settings in CORRECTED.items()},
    "gspo-sequence_mask": LOSSES["gspo"] | CORRECTED["sequence_mask"],
    "vespo-token_mask": LOSSES["vespo"] | CORRECTED["token_mask"] | {"correction_max": 9.0, "correction_min": 0.1},
    "grpo-recompute": LOSSES["grpo"] | RECOMPUTE,
    "luspo-current": LOSSES["luspo"] | CURRENT,
    "cispo-current": LOSSES["cispo"] | CURRENT,
    "kl-current-corrected": LOSSES["kl"] | CURRENT | {"importance_correction": "token_truncate"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_the_formula(stored: tuple[Path, Checkpoint, Rows], settings: dict[str, Any]) -> None:
    root, checkpoint, rows = stored
    # A small budget: the minibatch is several micro-batches of unequal numbers of rows.
    loss, gradient = loss_and_gradient(make(stored, **settings, tokens_per_micro_batch=64))
    model = double_model(root, checkpoint)
    expected = expected_loss(model, rows, settings)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradient.pop(name).double(), parameter.grad, atol=1e-5, rtol=1e-5)
    assert not gradient


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "luspo", "cispo"])
def test_micro_batches_change_nothing(stored: tuple[Path, Checkpoint, Rows], loss: str) -> None:
    whole = loss_and_gradient(make(stored, **LOSSES[loss], tokens_per_micro_batch=10_000))
    single = loss_and_gradient(make(stored, **LOSSES[loss], tokens_per_micro_batch=1, gradient_checkpointing=True))
    assert whole[0] == pytest.approx(single[0], abs=1e-6)
    for name, value in whole[1].items():
        torch.testing.assert_close(single[1][name], value, atol=2e-6, rtol=1e-5)


def test_what_is_stored_for_tokens_that_were_not_sampled_changes_nothing(
    stored: tuple[Path, Checkpoint, Rows],
) -> None:
    root, checkpoint, rows = stored
    spoiled = [
        row | {"logprobs": [x if m else float("nan") for x, m in zip(row["logprobs"], row["mask"], strict=True)]}
        for row in rows
    ]
    clean = loss_and_gradient(make(stored, **LOSSES["kl"]))
    dirty = loss_and_gradient(make((root, checkpoint, spoiled), **LOSSES["kl"]))
    assert clean[0] == dirty[0]
    assert all(torch.equal(clean[1][name], dirty[1][name]) for name in clean[1])
