"""Plays held-out tasks, one attempt each, at the rollouts' temperature.

The sampling seeds depend on the task and not on the checkpoint, so that checkpoints meet equal luck.
"""

from typing import Any

from environments import Trajectory
from steps.agent.session import PlayInputs, play_tasks
from steps.agent.shard import sweep_shard
from steps.agent.summary import held_out
from steps.common import tables
from steps.common.artifacts import Checkpoint, Evaluation
from steps.common.step import Step, Workspace


class EvaluateInputs(PlayInputs):
    """The held-out tasks are in `tasks`."""

    checkpoint: Checkpoint
    """The policy that the server must be serving."""


def evaluate(inputs: EvaluateInputs, workspace: Workspace) -> dict[str, Any]:
    """Play held-out tasks and average their rewards."""
    iteration = inputs.checkpoint.iteration
    return {"iteration": iteration, **held_out(play_held_out(inputs, workspace, iteration))}


def play_held_out(inputs: PlayInputs, workspace: Workspace, iteration: int | None) -> list[Trajectory]:
    """One attempt at each task, in their order, also as a table."""
    groups = play_tasks(inputs, workspace, group_size=1, iteration=iteration, shard=0, seed=f"{inputs.seed}/evaluate")
    tables.write(tables.frame_of_groups(groups, iteration, shard=0), workspace.out / tables.TRAJECTORIES)
    return [trajectory for group in groups for trajectory in group.trajectories]


EVALUATE = Step("evaluate", EvaluateInputs, Evaluation, evaluate, tidy=sweep_shard)

if __name__ == "__main__":
    EVALUATE.main()
