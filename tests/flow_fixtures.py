"""A flow without models: tiny steps in the place of those that play and train, a Prefect server, a folder of runs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.testing.utilities import prefect_test_harness
from run_fixtures import group_of

from environments import TrajectoryGroup
from flows import tasks
from flows.config import RunConfig
from flows.runtimes.base import Runtime, Say
from steps.common import tables
from steps.common.artifacts import BaseModelFiles, Checkpoint, Evaluation, Rollouts
from steps.common.runs import RUNS
from steps.common.step import Inputs, Step, Workspace

CONFIG = """
name = "night"
iterations = 2
[environment]
name = "tic_tac_toe"
[model.pretrain]
steps = 1
[rollout]
groups = 4
group_size = 2
groups_per_shard = 2
[evaluate]
tasks = 3
every = 1
[runtime]
type = "inline"
"""


class Steps:
    """What the tiny steps did, and what they are to do."""

    def __init__(self) -> None:
        self.made: list[str] = []
        """Paths, in the order in which the steps were at work on them."""
        self.served: list[str] = []
        """Checkpoints that the model server was asked for."""
        self.rewards: list[float | None] = [0.0, 1.0]
        """Of each group."""
        self.held_out: dict[int, Sequence[float | None]] = {}
        """Rewards of the held-out tasks, by checkpoint; all 0.5 where it isn't named."""
        self.raises: dict[str, list[Exception]] = {}
        """By path, or `serve`: the next errors."""

    def note(self, path: str) -> None:
        self.made.append(path)
        self.fail(path)

    def fail(self, path: str) -> None:
        if errors := self.raises.get(path):
            raise errors.pop(0)

    def pretrain(self, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        self.note(workspace.path)
        return {"parameters": 1, "metrics": {}}

    def checkpoint(self, inputs: Any, workspace: Workspace) -> dict[str, Any]:
        self.note(workspace.path)
        iteration = inputs.checkpoint.iteration + 1 if hasattr(inputs, "checkpoint") else 0
        (workspace.out / "adapter").write_text(inputs.fingerprint())
        return {"iteration": iteration, "base_model": "model", "step": iteration, "updated": True, "metrics": {}}

    def sft(self, inputs: Any, workspace: Workspace) -> dict[str, Any]:
        metrics = {"loss": 0.5, "token_accuracy": 0.75, "dropped_too_long": 1.0}
        return self.checkpoint(inputs, workspace) | {"metrics": metrics}

    def rollout(self, inputs: Any, workspace: Workspace) -> dict[str, Any]:
        self.note(workspace.path)
        groups = [group_of(task.id, self.rewards) for task in inputs.tasks]
        tables.write(
            tables.frame_of_groups(groups, inputs.iteration, inputs.shard), workspace.out / tables.TRAJECTORIES
        )
        counts = {"groups": len(groups), "trajectories": 2 * len(groups), "failed": 0, "failures": {}}
        tokens = {"sequences": 2 * len(groups), "prompt_tokens": 1, "completion_tokens": 1}
        return {"iteration": inputs.iteration, "shard": inputs.shard, "mean_reward": 0.5, **counts, **tokens}

    def evaluate(self, inputs: Any, workspace: Workspace) -> dict[str, Any]:
        self.note(workspace.path)
        iteration = inputs.checkpoint.iteration
        rewards = self.held_out.get(iteration, [0.5] * len(inputs.tasks))
        played = [group_of(task.id, [reward]).trajectories for task, reward in zip(inputs.tasks, rewards, strict=True)]
        groups = [TrajectoryGroup(task, attempts) for task, attempts in zip(inputs.tasks, played, strict=True)]
        tables.write(tables.frame_of_groups(groups, iteration, 0), workspace.out / tables.TRAJECTORIES)
        counts = {"tasks": len(inputs.tasks), "failed": 0, "failures": {}}
        return {"iteration": iteration, "reward": 0.5, "stderr": 0.1, "metrics": {}, **counts}


class NoServer:
    """Stands where the model server does; a real one takes a quarter of a minute."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(self, runtime: Runtime, config: RunConfig) -> "NoServer":
        return self

    def ensure(self, checkpoint: Checkpoint, say: Say) -> Any:
        self._steps.served.append(checkpoint.path)
        self._steps.fail("serve")

    def rest(self, say: Say) -> None:
        pass

    def close(self) -> None:
        self._steps.served.append("stopped")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Tiny steps, in this process."""
    return tiny_steps(monkeypatch)


def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Puts them in their places."""
    steps = Steps()
    for step, artifact, work in [
        (tasks.PRETRAIN, BaseModelFiles, steps.pretrain),
        (tasks.INITIALIZE, Checkpoint, steps.checkpoint),
        (tasks.SFT, Checkpoint, steps.sft),
        (tasks.ROLLOUT, Rollouts, steps.rollout),
        (tasks.TRAIN, Checkpoint, steps.checkpoint),
        (tasks.EVALUATE, Evaluation, steps.evaluate),
    ]:
        monkeypatch.setattr(tasks, step.name.upper(), Step(step.name, step.inputs, artifact, work))
    monkeypatch.setattr("flows.run.ModelServer", NoServer(steps))
    monkeypatch.setattr("flows.run.environment_of", lambda policy: {})
    return steps


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs."""
    monkeypatch.setenv(RUNS, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect's API, for flows in this process."""
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    with prefect_test_harness(server_startup_timeout=150):
        yield


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    """The settings of a night with tiny steps."""
    file = tmp_path / "night.toml"
    file.write_text(CONFIG)
    return RunConfig.from_toml(file, overrides)
