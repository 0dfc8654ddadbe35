"""Going back to a step: it is done again, and only what no longer fits is made anew after it."""

from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of
from prefect import flow

from flows.parameters import go_back
from flows.rescore import rescore_run
from flows.train import train
from steps.common import layout
from steps.common.artifacts import Checkpoint, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs, StepFailed
from steps.common.rewind import Rewind, bring_back, rewind
from steps.common.status import status_of
from steps.common.step import Inputs, Step, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(200)]
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Prefect's own clients are not closed

AFTER_0 = ["checkpoints/0001", "evaluations/0001", "iterations/0001/rollouts/000", "iterations/0001/rollouts/001"]


@pytest.fixture
def root(steps: Steps, runs: Path, tmp_path: Path) -> Path:
    """A finished run of two iterations."""
    train(config_of(tmp_path))
    steps.made.clear(), steps.served.clear()
    return runs / "night"


def manifests(root: Path) -> dict[str, bytes]:
    """By path, but for what was set aside."""
    return {
        path.parent.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob(layout.MANIFEST)
        if layout.SUPERSEDED not in path.parts
    }


def test_an_unchanged_shard_costs_nothing_else(steps: Steps, root: Path, tmp_path: Path) -> None:
    before = manifests(root)
    rewind(root, Rewind(iteration=0, step="rollout", shard=1))
    left = {path.rpartition("/")[0] for path in manifests(root)}
    assert left == {"", "checkpoints", "evaluations", "iterations/0000/rollouts"}
    train(config_of(tmp_path))
    assert steps.made == ["iterations/0000/rollouts/001"]
    after = manifests(root)
    assert before.keys() == after.keys()
    assert [path for path in before if before[path] != after[path]] == steps.made
    assert status_of(root).state == "finished"


def test_a_changed_shard_changes_what_depends_on_it(steps: Steps, root: Path, tmp_path: Path) -> None:
    before = manifests(root)
    steps.rewards = [0.0, 0.5]
    rewind(root, Rewind(iteration=0, step="rollout", shard=1))
    train(config_of(tmp_path))
    assert steps.made[0] == "iterations/0000/rollouts/001"
    assert sorted(steps.made[1:]) == sorted([*AFTER_0, "checkpoints/0002", "evaluations/0002"])
    after = manifests(root)
    kept = {"model", "checkpoints/0000", "evaluations/0000", "iterations/0000/rollouts/000"}
    assert {path for path in before if before[path] == after[path]} == kept
    aside = {path.parent.name for path in root.glob("superseded/*/checkpoints/*/manifest.json")}
    assert aside == {"0001", "0002"}


@pytest.mark.parametrize("step, made", [("train", ["checkpoints/0001"]), ("evaluate", ["evaluations/0000"])])
def test_each_step_can_be_done_again(steps: Steps, root: Path, tmp_path: Path, step: str, made: list[str]) -> None:
    rewind(root, Rewind.model_validate({"iteration": 0, "step": step}))
    train(config_of(tmp_path))
    assert steps.made == made


def test_what_was_asked_to_be_made_anew_never_comes_back(steps: Steps, root: Path, tmp_path: Path) -> None:
    rewind(root, Rewind(iteration=0, step="group"))  # sets checkpoint 1 aside, to come back
    rewind(root, Rewind(iteration=0, step="rollout", shard=0))
    train(config_of(tmp_path))
    assert steps.made == ["iterations/0000/rollouts/000"]
    rewind(root, Rewind(iteration=0, step="train"))
    train(config_of(tmp_path))
    assert steps.made[1:] == ["checkpoints/0001"]


def test_a_rewind_that_was_killed_undoes_itself(steps: Steps, root: Path, tmp_path: Path) -> None:
    before = manifests(root)
    aside, _ = rewind(root, Rewind(iteration=0, step="rollout"))
    (aside / "rewind.json").unlink()  # it is written last
    train(config_of(tmp_path))
    assert (steps.made, manifests(root)) == ([], before)
    assert "checkpoints/0000" not in steps.served


def test_groups_of_an_unfinished_shard_are_played_again(steps: Steps, root: Path, tmp_path: Path) -> None:
    shards = root / "iterations/0001/rollouts"
    (shards / "001").rename(shards / ".001.0123456789ab.groups")
    for shard, left in ((0, [".001.0123456789ab.groups"]), (None, [])):
        rewind(root, Rewind(iteration=1, step="rollout", shard=shard))
        assert [path.name for path in shards.iterdir()] == left
    train(config_of(tmp_path))
    assert sorted(steps.made) == ["iterations/0001/rollouts/000", "iterations/0001/rollouts/001"]


def test_a_damaged_record_is_named(root: Path) -> None:
    aside, _ = rewind(root, Rewind(iteration=1, step="train"))
    (aside / "rewind.json").write_text("{")
    with pytest.raises(CorruptArtifact, match=r"rewind\.json can't be read.*move .* away"):
        bring_back(root, "checkpoints/0002", "0" * 64)


def test_settings_that_changed_are_still_refused(steps: Steps, root: Path, tmp_path: Path) -> None:
    rewind(root, Rewind(iteration=1, step="train"))
    with pytest.raises(InvalidInputs, match=r"learning_rate: 1e-05 then, 0.5 now"):
        train(config_of(tmp_path, "train.learning_rate=0.5"))
    assert not bring_back(root, "checkpoints/0002", "0" * 64)


def test_rescoring_what_scores_the_same_plays_nothing(steps: Steps, root: Path, tmp_path: Path) -> None:
    before = manifests(root)
    then, now = rescore_run(root, 0)
    assert then == now.model_copy(update={"path": then.path})
    assert "iterations/0001/groups" not in manifests(root)
    train(config_of(tmp_path))
    assert (steps.made, steps.served) == ([], ["stopped"] * 2)
    after = manifests(root)
    anew = {path for path in before if before[path] != after[path]}
    assert anew == {"iterations/0000/groups", "iterations/0001/groups"}  # later ones are scored anew as well


def test_rescoring_plays_only_with_what_was_learnt(
    steps: Steps, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from environments.tic_tac_toe import TicTacToe

    async def score(self: TicTacToe, group: object) -> list[float]:
        return [1.0, 0.0]

    monkeypatch.setattr(TicTacToe, "score", score)
    then, now = rescore_run(root, 0)
    assert then.digest != now.digest
    steps.raises["checkpoints/0001"] = [InvalidInputs("stop here")]
    with pytest.raises(InvalidInputs, match="stop here"):
        train(config_of(tmp_path))
    assert (steps.made, steps.served) == (["checkpoints/0001"], ["stopped"] * 2)  # no request to a model so far
    assert read_manifest(root / "iterations/0000/batch")
    train(config_of(tmp_path))
    assert sorted(steps.made[1:]) == sorted([*AFTER_0, "checkpoints/0002", "evaluations/0002"])


def test_a_step_at_work_can_not_finish_what_was_given_up(root: Path) -> None:
    def update(inputs: Inputs, workspace: Workspace) -> dict[str, object]:
        (workspace.out / "adapter").write_text("half")
        rewind(root, Rewind(iteration=0, step="evaluate"))
        assert (workspace.out / "adapter").exists(), "it is not concerned"
        rewind(root, Rewind(iteration=1, step="group"))
        workspace.out.mkdir()  # as libraries do with the folder that they save to
        return {"iteration": 3, "base_model": "model", "step": 3, "updated": True, "metrics": {}}

    with pytest.raises(StepFailed, match=r"checkpoints/0003: a rewind has set its folder aside"):
        Step("train", Inputs, Checkpoint, update).run(Inputs(), root, "checkpoints/0003")
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["0000", "0001"]


def test_a_flow_run_goes_back_once(steps: Steps, root: Path, tmp_path: Path) -> None:
    target = Rewind(iteration=1, step="train")
    train(config_of(tmp_path), rewind=target)
    assert steps.made == ["checkpoints/0002"]
    train(config_of(tmp_path), rewind=target)  # another flow run
    assert steps.made == ["checkpoints/0002"] * 2

    @flow(persist_result=False)
    def tried_twice() -> None:
        for _ in range(2):
            go_back(root, target)
            train.fn(config_of(tmp_path))

    tried_twice()
    assert steps.made == ["checkpoints/0002"] * 3
