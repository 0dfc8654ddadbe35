"""Is one checkpoint better than another? A test on pairs: both have played the same tasks with the same seeds.

The differences' mean is resampled over tasks (the paired bootstrap), and the quantile at 1 - confidence is what the
true difference is at least. A bootstrap of a few values is too sure of itself: from three that are all positive it
can't draw a mean that is not. So there must be enough tasks with a difference for a sign test to be that sure, if all
of them went the same way: five for 95 %.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from steps.common.artifacts import PairedTest, Record

RESAMPLES = 10_000
AT_ONCE = 100
SEED = 0
METHOD = f"paired bootstrap over tasks, {RESAMPLES} resamples, percentile"


class Interval(Record):
    """By how much one is better than another, over the tasks that both have played."""

    difference: float
    low: float | None
    """The true difference lies between low and high, with `confidence`. None where too few tasks went differently."""
    high: float | None
    confidence: float
    pairs: int
    """Tasks that both have played."""


def compare(
    challenger: Mapping[str, float | None], incumbent: Mapping[str, float | None], confidence: float, margin: float
) -> PairedTest | None:
    """Compares rewards by task, None where the rollout failed. Returns None where no task has two of them."""
    rewards = [(new, incumbent.get(task)) for task, new in challenger.items()]
    pairs = [(new, old) for new, old in rewards if new is not None and old is not None]
    if not pairs:
        return None
    differences = [new - old for new, old in pairs]
    return PairedTest(
        method=METHOD,
        pairs=len(pairs),
        different=sum(difference != 0 for difference in differences),
        left_out=len(challenger.keys() | incumbent.keys()) - len(pairs),
        challenger=fmean(new for new, _ in pairs),
        incumbent=fmean(old for _, old in pairs),
        difference=fmean(differences),
        lower=lower_bound(differences, confidence),
        confidence=confidence,
        margin=margin,
    )


def interval(
    rewards: Mapping[str, float | None], reference: Mapping[str, float | None], confidence: float
) -> Interval | None:
    """By how much rewards are above a reference's, as `compare` pairs them. Returns None where no task has both."""
    test = compare(rewards, reference, (1 + confidence) / 2, 0.0)
    other = compare(reference, rewards, (1 + confidence) / 2, 0.0)
    if test is None or other is None:
        return None
    enough = test.different >= fewest(test.confidence)
    return Interval(
        difference=test.difference,
        low=test.lower if enough else None,
        high=-other.lower if enough else None,
        confidence=confidence,
        pairs=test.pairs,
    )


def lower_bound(differences: Sequence[float], confidence: float) -> float:
    """What the mean of `differences` is at least, by the percentile bootstrap. The same ones give the same bound."""
    import numpy as np

    random, values = np.random.default_rng(SEED), np.array(differences)
    sizes = [(AT_ONCE, values.size)] * (RESAMPLES // AT_ONCE)
    means = np.concatenate([values[random.integers(values.size, size=size)].mean(axis=1) for size in sizes])
    return float(np.quantile(means, 1 - confidence, method="lower"))


def fewest(confidence: float) -> int:
    """Tasks that must have gone differently for two checkpoints before this confidence means anything."""
    return max(2, math.ceil(math.log2(1 / (1 - confidence))))
