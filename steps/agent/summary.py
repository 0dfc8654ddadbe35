"""Trajectories in a few figures."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from environments.base import Trajectory
from steps.common.errors import TooManyFailures

FEWEST = 2


def held_out(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What an evaluation says of one attempt a task. Raises `TooManyFailures`."""
    scored, failures = rewards(trajectories), failures_by_type(trajectories)
    if len(scored) < FEWEST:
        raise TooManyFailures(f"{len(scored)} tasks have a reward; a mean with a standard error needs {FEWEST}")
    return {
        "tasks": len(trajectories),
        "failed": sum(failures.values()),
        "failures": failures,
        "reward": sum(scored) / len(scored),
        "stderr": standard_error(scored),
        "metrics": mean_metrics(trajectories),
    }


def failures_by_type(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many failed, by the exception's name."""
    counts = Counter(t.failure.type for t in trajectories if t.failure)
    return dict(sorted(counts.items()))


def rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    """Of those that did not fail."""
    return [t.reward for t in trajectories if t.reward is not None]


def mean_reward(trajectories: Sequence[Trajectory]) -> float | None:
    """Over those that did not fail; None where all did."""
    scored = rewards(trajectories)
    return fmean(scored) if scored else None


def standard_error(values: Sequence[float]) -> float:
    """Of their mean: sample standard deviation / √n. Needs two values."""
    return stdev(values) / math.sqrt(len(values))


def mean_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Each metric over the trajectories that have it and did not fail."""
    names = sorted({name for t in trajectories for name in t.metrics})
    return {name: fmean(t.metrics[name] for t in trajectories if name in t.metrics) for name in names}
