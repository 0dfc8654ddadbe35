"""Makers of small recorded runs for tests."""

from pathlib import Path
from typing import Any

from environments import Failure, Task, TokenSequence, Trajectory, TrajectoryGroup
from steps.common import layout, tables
from steps.common.artifacts import Rollouts
from steps.common.step import Inputs, Step, Workspace

TINY = """
[model.pretrain]
steps = 3
hidden_size = 64
layers = 1
mlp_size = 64
[lora]
rank = 8
[sampling]
max_tokens = 4
[serve]
max_model_len = 512
"""
"""Settings with which a real trainer and a real vLLM take seconds; a run's TOML ends with them."""


def sequence(length: int = 6, sampled: tuple[int, ...] = (2, 3, 5)) -> TokenSequence:
    """`length` tokens of which those at the positions `sampled` were sampled."""
    mask = [position in sampled for position in range(length)]
    return TokenSequence(list(range(length)), mask, [-0.25 * hit for hit in mask])


def trajectory(task: str, attempt: int, reward: float | None, *sequences: TokenSequence, **more: Any) -> Trajectory:
    """A trajectory; one without a reward has failed."""
    failure = Failure("ValueError", "no such move", "…") if reward is None else None
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]
    return Trajectory(task, attempt, messages, list(sequences or (sequence(),)), reward, failure=failure, **more)


def group_of(task: str, rewards: list[float | None]) -> TrajectoryGroup:
    """A group with one attempt a reward; None for a failed one."""
    return TrajectoryGroup(Task(id=task), [trajectory(task, i, reward) for i, reward in enumerate(rewards)])


def store_rollouts(root: Path, groups: list[TrajectoryGroup], iteration: int = 0, shard: int = 0) -> Rollouts:
    """Publishes `groups` as a shard of rollouts, as the rollout step would."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    failed = sum(trajectory.failure is not None for trajectory in played)

    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        frame = tables.frame_of_groups(groups, iteration, shard)
        tables.write(frame, workspace.out / tables.TRAJECTORIES)
        return {
            "iteration": iteration,
            "shard": shard,
            "groups": len(groups),
            "trajectories": len(played),
            "failed": failed,
            "failures": {"ValueError": failed} if failed else {},
            "mean_reward": 0.5,
            "sequences": len(played),
            "prompt_tokens": 1,
            "completion_tokens": 1,
        }

    return Step("rollout", Inputs, Rollouts, work).run(Inputs(), root, layout.rollouts(iteration, shard))
