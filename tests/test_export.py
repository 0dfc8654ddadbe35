"""`nightschool export`: the card's numbers are the run's; nothing is written over; wrong requests are one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from flows.export import check_free, export
from steps.common import layout
from steps.common.artifacts import Checkpoint, Evaluation, read_artifact
from steps.common.card import card_of
from steps.common.errors import InvalidInputs
from steps.common.runs import RunRecord, write_record
from steps.common.step import Inputs, Step, Workspace

CONFIG = {
    "iterations": 9,
    "environment": {"name": "tic_tac_toe", "options": {}},
    "train": {"learning_rate": 0.01},
    "lora": {"rank": 8},
    "runtime": {"type": "docker"},
}


class Numbered(Inputs):
    number: int


def checkpoint(root: Path, iteration: int, base_model: str) -> Checkpoint:
    """A finished checkpoint, without files."""

    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        digest = None if "/" in base_model else "0123456789abcdef"
        facts = {"base_model": base_model, "base_digest": digest, "metrics": {"kl": 0.25} if iteration else {}}
        return {"iteration": iteration, "step": 2 * iteration, "updated": True, **facts}

    made = Step("train", Numbered, Checkpoint, work)
    return made.run(Numbered(number=iteration), root, layout.checkpoint(iteration))


def evaluation(root: Path, iteration: int, reward: float) -> None:
    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        counts = {"tasks": 64, "failed": 1, "failures": {"ValueError": 1}}
        return {"iteration": iteration, "reward": reward, "stderr": 0.0312, "metrics": {}, **counts}

    Step("evaluate", Numbered, Evaluation, work).run(Numbered(number=iteration), root, layout.evaluation(iteration))


@pytest.fixture
def run(runs: Path) -> Path:
    """A run on a model of the hub, with checkpoints 0, 1 and 2, of which the first two were evaluated."""
    root = runs / "night"
    for folder in ("checkpoints", "evaluations"):
        (root / folder).mkdir(parents=True)
    write_record(root, RunRecord(config=CONFIG, versions={}))
    for iteration in range(3):
        checkpoint(root, iteration, "owner/small")
    evaluation(root, 0, 0.25)
    evaluation(root, 1, 0.5)
    return root


def test_the_card_has_the_runs_numbers(run: Path) -> None:
    card = card_of(run, read_artifact(Checkpoint, run, layout.checkpoint(1)), merged=False)
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("owner/small", "peft")
    for line in (
        "# night, checkpoint 1",
        "- Base model: owner/small",
        "- Iterations: 1, optimizer steps: 2",
        "| 0 | 0.2500 | 0.0312 | 64 | 1 |",
        "| 1 | 0.5000 | 0.0312 | 64 | 1 |",
        "| kl | 0.25 |",
    ):
        assert f"\n{line}\n" in card, line
    settings = json.loads(card.split("```json\n")[1].split("```")[0])
    assert (settings["environment"], settings["train"]) == (CONFIG["environment"], CONFIG["train"])
    assert "runtime" not in settings
    assert "| nightschool | " in card
    assert str(run) not in card


def test_the_card_says_what_is_not_known(run: Path) -> None:
    later = card_of(run, read_artifact(Checkpoint, run, layout.checkpoint(2)), merged=True)
    assert "This checkpoint itself was not evaluated." in later
    assert "library_name: " + '"transformers"' in later
    unevaluated = checkpoint(run, 3, layout.MODEL)
    card = card_of(run, unevaluated, merged=True)
    assert "base_model" not in yaml.safe_load(card.split("---")[1]), "the hub takes no folder for one"
    assert "- Base model: a small model that the run made (digest 0123456789abcdef)" in card


def test_nothing_is_written_over(tmp_path: Path) -> None:
    check_free(tmp_path / "new", "fingerprint")
    check_free(tmp_path, "fingerprint")
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(InvalidInputs, match="is not empty: export to another folder"):
            check_free(taken, "fingerprint")


def test_wrong_requests_are_one_line(run: Path, tmp_path: Path) -> None:
    made = checkpoint(run, 3, layout.MODEL)
    with pytest.raises(InvalidInputs, match="--push night: a repository on the hub is called OWNER/NAME"):
        export(run, made, tmp_path / "out", merge=True, repo="night")
    with pytest.raises(InvalidInputs, match=r"the base model of night is not on the hub.* --merge them"):
        export(run, made, tmp_path / "out", merge=False, repo="agents/night")
    told = CliRunner().invoke(app, ["export", "night", "--iteration", "7", "--to", str(tmp_path / "out")])
    assert isinstance(told.exception, InvalidInputs)
    assert "night has no finished checkpoint 7" in str(told.exception)
    assert not (tmp_path / "out").exists()
