"""A run's settings: read from TOML, overridden, refused with a line a mistake; and what follows from them."""

from collections import Counter
from pathlib import Path

import pytest

from environments import Task
from flows.config import RunConfig, parse_override
from flows.plan import Plan, tasks_of
from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
SMALL = """
name = "small"
iterations = 3
[environment]
name = "tic_tac_toe"
[model.pretrain]
steps = 1
[rollout]
groups = 5
groups_per_shard = 2
[evaluate]
tasks = 7
every = 2
"""


def read(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return RunConfig.from_toml(file, overrides)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_is_understood(file: Path) -> None:
    assert RunConfig.from_toml(file).name == file.stem


@pytest.mark.parametrize(
    "change, message",
    [
        (("[rollout]", "[rolout]"), "unknown key rolout; did you mean rollout?"),
        (
            ("groups_per_shard = 2", "group_per_shard = 2"),
            "unknown key rollout.group_per_shard; did you mean rollout.gro",
        ),
        (("steps = 1", "step = 1"), "unknown key model.pretrain.step; did you mean model.pretrain.steps?"),
        (("groups = 5", 'groups = "many"'), "rollout.groups = 'many': should be a valid integer"),
        (("iterations = 3", "iterations = 0"), "iterations = 0: should be greater than or equal to 1"),
        (("iterations = 3", ""), "iterations is missing"),
        (('name = "small"', 'name = "../up"'), "name = '../up'"),
        (("steps = 1", "steps = 1\n[model]\nbase = 'a/b'"), "give either model.base or a table [model.pretrain]"),
        (("[evaluate]", "[runtime]\ntype='process'\nparalel = 2\n[evaluate]"), "did you mean runtime.parallel?"),
        (("[evaluate]", "[runtime]\ntype='slurm'\n[evaluate]"), "runtime = {'type': 'slurm'}: "),
        (("[evaluate]", "[evaluate"), "is not TOML"),
    ],
)
def test_a_mistake_is_a_line_that_names_it(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidInputs) as caught:
        read(tmp_path, SMALL.replace(*change))
    assert message in str(caught.value)
    assert all(line.startswith(str(tmp_path / "run.toml")) for line in str(caught.value).splitlines())


def test_each_mistake_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs) as caught:
        read(tmp_path, SMALL.replace("groups = 5", "groups = 0").replace("tasks = 7", "taks = 7"))
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_are_typed_as_in_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, SMALL, "train.learning_rate=1e-3", "rollout.groups = 6", "name=other", "lora.rank=8")
    assert (config.train.learning_rate, config.rollout.groups, config.name, config.lora.rank) == (1e-3, 6, "other", 8)


@pytest.mark.parametrize("override", ["train", "=3", "a b=3"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(InvalidInputs, match="--set"):
        parse_override(override)


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.groups=9000", "rollout.groups = 9000, but the train split of the environment has 8192 tasks"),
        ("evaluate.tasks=300", "evaluate.tasks = 300, but the test split of the environment has 256 tasks"),
        ("environment.name=chess", "there is no environment 'chess'"),
        ("environment.options.plays=Y", "option 'plays'"),
    ],
)
def test_a_plan_refuses_what_does_not_fit(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InvalidInputs) as caught:
        Plan(read(tmp_path, SMALL, override))
    assert message in str(caught.value)


def test_settings_without_a_model_are_for_evaluations_only(tmp_path: Path) -> None:
    config = read(tmp_path, SMALL.replace("[model.pretrain]\nsteps = 1", ""))
    with pytest.raises(InvalidInputs, match=r"small has no model to train: give either model.base or a table"):
        config.to_train()


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs, match="there is no base model"):
        Plan(read(tmp_path, SMALL.replace("[model.pretrain]\nsteps = 1", f'[model]\nbase = "{tmp_path}/nowhere"')))


def test_what_each_checkpoint_plays(tmp_path: Path) -> None:
    plan = Plan(read(tmp_path, SMALL))
    assert [plan.evaluation_is_due(i) for i in range(4)] == [True, False, True, True]
    nothing = Checkpoint(path="", digest="", iteration=1, base_model="", step=0, updated=False, metrics={})
    assert list(plan.played_by(nothing)) == [f"iterations/0001/rollouts/{shard:03d}" for shard in range(3)]
    assert list(plan.played_by(nothing.model_copy(update={"iteration": 3}))) == ["evaluations/0003"]


@pytest.mark.parametrize("groups", [1, 3, 4, 10])
def test_no_task_comes_twice_in_an_epoch(groups: int) -> None:
    tasks = [Task(id=str(i)) for i in range(10)]
    turns = len(tasks) // groups
    for epoch in range(3):
        played = [task.id for turn in range(turns) for task in tasks_of(epoch * turns + turn, tasks, groups, seed=1)]
        assert len(played) == turns * groups
        assert max(Counter(played).values()) == 1


def test_the_order_of_tasks_follows_the_seed() -> None:
    tasks = [Task(id=str(i)) for i in range(100)]
    assert tasks_of(3, tasks, 8, seed=1) == tasks_of(3, tasks, 8, seed=1)
    assert tasks_of(3, tasks, 8, seed=1) != tasks_of(3, tasks, 8, seed=2)
    assert tasks_of(0, tasks, 8, seed=1) != tasks_of(12, tasks, 8, seed=1)
