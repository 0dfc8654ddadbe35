"""The trainer's loss against 21 golden numbers: loss, gradient and clip fraction of TRL's own, computed in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_grpo_losses import LOSSES, Rows, make, stored

from steps.common.artifacts import Checkpoint
from steps.grpo.correction import correction
from steps.grpo.trainer import RecordTrainer

__all__ = ["stored"]
pytestmark = pytest.mark.train

GOLDEN = json.loads((Path(__file__).parent / "grpo_golden.json").read_text())


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
