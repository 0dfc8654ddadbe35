"""The base model of a run: what it is on any machine, and where it lies on this one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from flow_fixtures import Steps, config_of

from flows.config import ModelSettings, RunConfig
from flows.train import train
from steps.common import layout
from steps.common.errors import InvalidInputs
from steps.common.models import digest_of_model, find_model, link_base
from steps.common.runs import RUNS
from steps.common.status import damages
from steps.common.step import Inputs, Step, Workspace
from steps.initialize import INITIALIZE, InitializeInputs


def on_model(tmp_path: Path, folder: Path, iterations: int = 1) -> RunConfig:
    """The settings of a run on the model in `folder`."""
    config = config_of(tmp_path, f"iterations={iterations}")
    return config.model_copy(update={"model": ModelSettings(base=str(folder))})


def make_model(folder: Path, weights: str = "weights") -> Path:
    """Files as a model's folder has them, and some that it only happens to have."""
    folder.mkdir(parents=True)
    files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": weights}
    for name, text in {**files, "README.md": str(folder), layout.MANIFEST: str(folder)}.items():
        (folder / name).write_text(text)
    (folder / ".cache").mkdir()
    return folder


def test_a_model_is_its_contents_wherever_it_lies(tmp_path: Path) -> None:
    here, there = make_model(tmp_path / "here"), make_model(tmp_path / "there")
    assert digest_of_model(here) == digest_of_model(there)
    (there / "model.safetensors").write_text("Weights")
    assert digest_of_model(here) != digest_of_model(there)
    (there / "model.safetensors").rename(there / "other.safetensors")
    assert digest_of_model(here) != digest_of_model(there)


def test_the_link_is_followed_moved_and_missed(tmp_path: Path) -> None:
    root, first, second = tmp_path / "run", make_model(tmp_path / "first"), make_model(tmp_path / "second")
    root.mkdir()
    with pytest.raises(InvalidInputs, match=r"there is no base model at .*run/base.*ln -sfn"):
        find_model(root, layout.BASE)
    for folder in (first, second):
        link_base(root, folder, "digest")
        assert find_model(root, layout.BASE) == str(folder)
    assert [path.name for path in root.iterdir()] == ["base"]
    shutil.rmtree(second)
    with pytest.raises(InvalidInputs, match="there is no base model at"):
        find_model(root, layout.BASE)


def test_other_contents_than_the_run_was_started_on_are_refused(tmp_path: Path) -> None:
    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        return {"iteration": 0, "base_model": layout.BASE, "step": 0, "updated": False, "metrics": {}}

    root, folder = tmp_path / "run", make_model(tmp_path / "model")
    (root / "checkpoints").mkdir(parents=True)
    inputs = InitializeInputs(base_model=layout.BASE, base_digest=digest_of_model(folder))
    Step("initialize", InitializeInputs, INITIALIZE.artifact, work).run(inputs, root, layout.checkpoint(0))
    link_base(root, folder, digest_of_model(folder))
    (folder / "model.safetensors").write_text("other")
    with pytest.raises(
        InvalidInputs, match=r"model does not hold the base model that .*run was started on, or its con"
    ):
        link_base(root, folder, digest_of_model(folder))


def test_a_copied_model_is_in_the_way_of_the_link(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    make_model(tmp_path / "run/base")
    with pytest.raises(InvalidInputs, match="run/base is in the way"):
        link_base(tmp_path / "run", folder, "digest")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("prefect_server")
def test_a_run_goes_on_where_run_and_model_lie_elsewhere(
    steps: Steps, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "models/small")
    evaluations = train(on_model(tmp_path, model))
    root, moved = tmp_path / "elsewhere/runs/night", tmp_path / "elsewhere/models/other-name"
    for path, target in ((runs / "night", root), (model, moved)):
        target.parent.mkdir(parents=True)
        path.rename(target)
    monkeypatch.setenv(RUNS, str(root.parent))
    steps.made.clear()
    assert train(on_model(tmp_path, moved)) == evaluations
    assert steps.made == []
    assert find_model(root, layout.BASE) == str(moved)
    assert all(damage is None for _, damage in damages(root)), "the model is not of the run"
    (moved / "model.safetensors").write_text("trained further")
    with pytest.raises(InvalidInputs, match="other-name does not hold the base model"):
        train(on_model(tmp_path, moved, iterations=2))
