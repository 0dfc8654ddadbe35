"""Losses and gradients of the trainer against formulas written here: in float64 from each paper, and 21 golden numbers.

The golden record's loss, gradient and clip fraction are those of TRL's own loss, computed in float64.
"""

import json
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
from steps.grpo.correction import correction
from steps.grpo.model import prepare_torch
from steps.grpo.trainer import RecordTrainer
from steps.grpo.update import make_trainer

pytestmark = pytest.mark.train

TEMPERATURE = 0.7
GOLDEN = json.loads((Path(__file__).parent / "grpo_golden.json").read_text())
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


class GivenLogprobs(RecordTrainer):  # type: ignore[misc]
    """The trainer's loss on log-probabilities that a test chose."""

    given: torch.Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self._seen = self.given, torch.zeros_like(self.given)
        return self.given, torch.zeros_like(self.given), None


LOGP = [[-0.10, -0.70, -1.20, -0.30, -2.00], [-0.50, -0.40, -0.90, -1.50, 0], [-1.00, -0.20, -0.60, 0, 0]]
LOGP += [[-0.80, -1.10, -0.05, -0.35, -0.90]]
OLD = [[-0.30, -0.50, -1.00, -0.45, -1.50], [-0.45, -0.80, -0.70, -1.10, 0], [-0.60, -0.25, -1.10, 0, 0]]
OLD += [[-0.90, -0.60, -0.10, -0.70, -0.50]]
SAMPLED = [[-0.28, -0.55, -1.05, -0.40, -1.60], [-0.50, -0.75, -0.72, -1.00, 0], [-0.62, -0.20, -1.00, 0, 0]]
SAMPLED += [[-0.95, -0.62, -0.12, -0.65, -0.45]]
REFERENCE = [[-0.20, -0.60, -1.10, -0.40, -1.80], [-0.40, -0.50, -0.80, -1.20, 0], [-0.70, -0.30, -0.90, 0, 0]]
REFERENCE += [[-0.85, -0.90, -0.08, -0.50, -0.70]]
NOT_SCALED = torch.tensor([0.5625, -0.4375, 0.0625, -0.1875])
"""Rewards 1, 0, 0.5, 0.25 without their mean."""
BY_GROUP = NOT_SCALED / (NOT_SCALED.std() + 1e-4)
LENGTHS, TOOL_TOKEN = [5, 4, 3, 5], (3, 2)

GOLDEN_SETTINGS: dict[str, dict[str, Any]] = {
    "GRPO        loss_type=grpo": {"loss_type": "grpo"},
    "DAPO        loss_type=dapo, epsilon_high=0.28": {"loss_type": "dapo", "epsilon_high": 0.28},
    "Dr.GRPO     loss_type=dr_grpo, scale_rewards=none, max_completion_length=8": {
        "loss_type": "dr_grpo",
        "max_completion_length": 8,
    },
    "GSPO        loss_type=grpo, importance_sampling_level=sequence, eps=3e-4/4e-4": LOSSES["gspo"],
    "GSPO-wide   same, epsilon=0.2": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "CISPO       loss_type=cispo, epsilon_high=5.0": {"loss_type": "cispo", "epsilon_high": 5.0},
    "CISPO-tight loss_type=cispo, epsilon_high=1.2": {"loss_type": "cispo", "epsilon_high": 1.2},
    "two-sided   loss_type=grpo, delta=1.4": {"loss_type": "grpo", "delta": 1.4},
    "GRPO+KL     beta=0.04, use_bias_correction_kl=True": {"loss_type": "grpo", "beta": 0.04},
    "GRPO+KL(k3) beta=0.04, use_bias_correction_kl=False": {
        "loss_type": "grpo",
        "beta": 0.04,
        "use_bias_correction_kl": False,
    },
    "SAPO        loss_type=sapo": {"loss_type": "sapo"},
    "LUSPO       loss_type=luspo, level=sequence": LOSSES["luspo"],
    "VESPO       loss_type=vespo": {"loss_type": "vespo"},
    "GRPO+TIS    token_truncate C_max=1.05": {"importance_correction": "token_truncate", "correction_max": 1.05},
    "GRPO+MIS    token_mask C=[0.95,1.05]": {
        "importance_correction": "token_mask",
        "correction_max": 1.05,
        "correction_min": 0.95,
    },
    "GRPO+seqTIS sequence_truncate C_max=1.05": {
        "importance_correction": "sequence_truncate",
        "correction_max": 1.05,
    },
    "GRPO+seqMIS sequence_mask C_max=3.0 (TRL default)": {
        "importance_correction": "sequence_mask",
        "correction_max": 3.0,
    },
    "GRPO no tool mask": {"loss_type": "grpo"},
}
NOT_OFFERED = {
    "BNPO        loss_type=bnpo",  # by definition depends on how a batch is split
    "GRPO+OPSM   off_policy_mask_threshold=0.05",  # no setting of ours
    "DAPO GA=2,spg=4",  # TRL's accumulation over its own generation batches; ours divides by the minibatch's tokens
}


def test_every_golden_number_is_used_or_known_not_to_apply() -> None:
    assert set(GOLDEN) == set(GOLDEN_SETTINGS) | NOT_OFFERED


@pytest.mark.parametrize("name", GOLDEN_SETTINGS)
def test_golden_record(stored: tuple[Path, Checkpoint, Rows], name: str) -> None:
    settings = {"loss_type": "grpo", "old_logprobs": "recompute", "importance_correction": "none"} | GOLDEN_SETTINGS[
        name
    ]
    trainer = make(stored, **settings)
    trainer.__class__ = GivenLogprobs
    trainer.given = torch.tensor(LOGP, requires_grad=True)
    mask = torch.tensor([[t < n for t in range(5)] for n in LENGTHS]).long()
    tool = mask.clone()
    if name != "GRPO no tool mask":
        tool[TOOL_TOKEN] = 0
    ids = torch.ones(4, 5, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "tool_mask": tool,
        "advantages": NOT_SCALED if "scale_rewards=none" in name else BY_GROUP,
        "old_per_token_logps": torch.tensor(OLD),
        "ref_per_token_logps": torch.tensor(REFERENCE),
        "sampling_per_token_logps": torch.tensor(SAMPLED),
        "num_items_in_batch": tool.sum().float(),
        "rows_scale": torch.tensor(1.0),
    }
    if settings["importance_correction"] != "none":
        inputs["importance_sampling_ratio"] = correction(trainer.args, torch.tensor(OLD), inputs)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient, golden = trainer.given.grad, GOLDEN[name]
    assert loss.item() == pytest.approx(golden["loss"], abs=1e-6)
    assert gradient.norm().item() == pytest.approx(golden["grad_l2"], abs=1e-6)
    assert gradient.sum().item() == pytest.approx(golden["grad_sum"], abs=1e-6)
    assert (gradient[tool == 0] == 0).all()
    if golden["clip_region"] is not None:
        assert trainer._clipped() == pytest.approx(golden["clip_region"], abs=1e-6)
