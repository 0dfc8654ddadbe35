"""What the step `train` refuses and stops at: what goes wrong leaves no checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from grpo_fixtures import ragged_rows, run, train, train_inputs, write_batch

from steps.common.artifacts import Batch, Checkpoint
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.step import Workspace
from steps.grpo.batch import read_rows
from steps.grpo.update import make_trainer
from steps.train import TrainSettings

__all__ = ["run"]
pytestmark = pytest.mark.train


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
