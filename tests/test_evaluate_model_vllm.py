"""A trained checkpoint, its base model and a model behind an address, served by one real vLLM, on the same tasks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows.config import RunConfig
from flows.contest import Base, Contest, Foreign, Own, Player
from flows.evaluate import play
from flows.plan import Plan
from flows.run import Run
from flows.runtimes.service import FOLDER
from steps.common import layout, tables
from steps.common.artifacts import Checkpoint, Evaluation, ModelEvaluation
from steps.common.comparison import comparison
from steps.common.models import digest_of_model
from steps.common.step import Inputs, Step, Workspace
from steps.evaluate_model import ModelServer
from steps.serving.endpoint import Endpoint

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_server")]
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Prefect's own clients are not closed
SETTINGS = """
name = "trio"
iterations = 1
[environment]
name = "tic_tac_toe"
[evaluate]
tasks = 8
[sampling]
max_tokens = 8
[lora]
rank = 8
alpha = 16
target_modules = ["q_proj", "v_proj"]
[serve]
max_model_len = 1024
cpu_cache_mib = 64
[runtime]
type = "inline"
[model]
"""
KEY_VARIABLE = "TEST_OWN_KEY"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Any:
    """A run with one trained checkpoint, open in a flow."""
    file = tmp_path / "trio.toml"
    file.write_text(f'{SETTINGS}base = "{tiny_run / "model"}"\n')
    config, root = RunConfig.from_toml(file), tmp_path / "trio"

    def train(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        shutil.copytree(tiny_run / "checkpoints/0001", workspace.out, dirs_exist_ok=True)
        base = {"base_model": layout.BASE, "base_digest": digest_of_model(tiny_run / "model")}
        return {"iteration": 1, "step": 1, "updated": True, "metrics": {}, **base}

    Step("train", Inputs, Checkpoint, train).run(Inputs(), root, layout.checkpoint(1))
    return config, root


def transcripts(root: Path, made: Evaluation | ModelEvaluation) -> list[Any]:
    frame = tables.read([root / made.path / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    return frame.select("task", "messages", "turns", "prompt_tokens", "completion_tokens").rows()


def test_all_compare_and_the_base_is_the_same_by_both_ways(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, root = run

    @flow(persist_result=False)
    def contest() -> tuple[Any, Any, Any]:
        with Run.open(Plan(config), root, print) as opened:
            opened.record()

            def played(player: Player) -> Any:
                return play(opened, Contest(root, config, player, is_new=False))

            base = played(Base())
            served = Endpoint.read(root / FOLDER / "endpoint.json")
            assert served
            monkeypatch.setenv(KEY_VARIABLE, served.api_key)
            at = ModelServer(base_url=served.base_url, key_variable=KEY_VARIABLE)
            return base, played(Foreign(served.model, at)), played(Own(1))

    base, foreign, own = contest()
    assert base.tasks == foreign.tasks == own.tasks == 8
    assert transcripts(root, base) == transcripts(root, foreign) != transcripts(root, own)
    assert (base.reward, base.usage) == (foreign.reward, foreign.usage)
    found = comparison(root, checkpoints=False)
    assert found.reference == "trio@1"
    assert sorted(row.model for row in found.models) == sorted(["base", foreign.model.name, "trio@1"])
    assert all(row.difference.pairs == 8 for row in found.models if row.difference)
    sequences = {
        made.path: tables.read([root / made.path / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)["sequences"]
        for made in (base, foreign)
    }
    assert sequences[base.path].list.len().min() == 1 and sequences[foreign.path].list.len().max() == 0
