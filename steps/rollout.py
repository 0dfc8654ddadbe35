"""Rolls a shard of tasks out: every task is attempted `group_size` times by the policy as it is now."""

from typing import Any

from pydantic import PositiveInt

from steps.agent.session import PlayInputs, play_tasks
from steps.agent.shard import sweep_shard
from steps.agent.summary import failures_by_type, mean_reward
from steps.common import tables
from steps.common.artifacts import Checkpoint, Rollouts
from steps.common.step import Step, Workspace


class RolloutInputs(PlayInputs):
    """One shard of an iteration."""

    checkpoint: Checkpoint
    """The policy that the server must be serving."""
    iteration: int
    shard: int
    group_size: PositiveInt


def rollout(inputs: RolloutInputs, workspace: Workspace) -> dict[str, Any]:
    """Play a shard of tasks and record exact tokens."""
    seed = f"{inputs.seed}/rollout/{inputs.iteration}"
    groups = play_tasks(inputs, workspace, inputs.group_size, inputs.iteration, inputs.shard, seed)
    frame = tables.frame_of_groups(groups, inputs.iteration, inputs.shard)
    tables.write(frame, workspace.out / tables.TRAJECTORIES)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failures = failures_by_type(trajectories)
    return {
        "iteration": inputs.iteration,
        "shard": inputs.shard,
        "groups": len(groups),
        "trajectories": len(trajectories),
        "failed": sum(failures.values()),
        "failures": failures,
        "mean_reward": mean_reward(trajectories),
        "sequences": sum(len(t.sequences) for t in trajectories),
        "prompt_tokens": sum(t.prompt_tokens for t in trajectories),
        "completion_tokens": sum(t.completion_tokens for t in trajectories),
    }


ROLLOUT = Step("rollout", RolloutInputs, Rollouts, rollout, tidy=sweep_shard)

if __name__ == "__main__":
    ROLLOUT.main()
