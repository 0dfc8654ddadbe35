"""Plays held-out tasks, one attempt each, at the rollouts' temperature.

The sampling seeds depend on the task and not on the checkpoint, so that checkpoints meet equal luck.
"""

from typing import Any

from steps.agent.session import PlayInputs, play_tasks
from steps.agent.shard import sweep_shard
from steps.agent.summary import failures_by_type, mean_metrics, rewards, standard_error
from steps.common import tables
from steps.common.artifacts import Evaluation
from steps.common.errors import TooManyFailures
from steps.common.step import Step, Workspace

FEWEST = 2


class EvaluateInputs(PlayInputs):
    """The held-out tasks are in `tasks`."""


def evaluate(inputs: EvaluateInputs, workspace: Workspace) -> dict[str, Any]:
    """Play held-out tasks and average their rewards."""
    groups = play_tasks(inputs, workspace, group_size=1, shard=0, seed=f"{inputs.seed}/evaluate")
    frame = tables.frame_of_groups(groups, inputs.checkpoint.iteration, shard=0)
    tables.write(frame, workspace.out / tables.TRAJECTORIES)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scored, failures = rewards(trajectories), failures_by_type(trajectories)
    if len(scored) < FEWEST:
        raise TooManyFailures(f"{len(scored)} tasks have a reward; a mean with a standard error needs {FEWEST}")
    return {
        "iteration": inputs.checkpoint.iteration,
        "tasks": len(inputs.tasks),
        "failed": sum(failures.values()),
        "failures": failures,
        "reward": sum(scored) / len(scored),
        "stderr": standard_error(scored),
        "metrics": mean_metrics(trajectories),
    }


EVALUATE = Step("evaluate", EvaluateInputs, Evaluation, evaluate, tidy=sweep_shard)

if __name__ == "__main__":
    EVALUATE.main()
