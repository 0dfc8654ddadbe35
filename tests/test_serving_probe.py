"""The decision of the probe: which weights a server answers with, whatever either side rounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steps.serving.probe import TOLERANCE, judge


def answers(seed: int, tokens: int, update: float, noise: float, truth: str) -> Any:
    """Expected, alternatives and served log-probabilities, where the server has the weights called `truth`."""
    random = np.random.default_rng(seed)
    base = -random.exponential(2.0, tokens)
    previous = base + random.normal(0, 0.5, tokens)
    expected = previous + random.normal(0, update, tokens)
    source = {"checkpoint": expected, "previous": previous, "base": base, "something else": base[::-1] * 3}[truth]
    return expected, {"previous": previous, "base": base}, source + random.normal(0, noise, tokens)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["checkpoint", "previous", "base", "something else"]))
def test_an_update_below_the_rounding_is_told_apart(seed: int, truth: str) -> None:
    # Each token is rounded by 0.05 and moved by 0.04: no single one tells, 512 do.
    verdict = judge(*answers(seed, 512, 0.04, 0.05, truth), {}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == truth
    if truth in ("checkpoint", "previous"):
        assert verdict.shares["previous"] == pytest.approx(float(truth == "checkpoint"), abs=0.5)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.1))
def test_rounding_alone_never_condemns(seed: int, update: float) -> None:
    assert judge(*answers(seed, 64, update, 0.05, "checkpoint"), {}, TOLERANCE["bfloat16"]).answers_as == "checkpoint"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(1e-5, 1.0))
def test_float32_sees_any_update_worth_the_name(seed: int, update: float) -> None:
    verdict = judge(*answers(seed, 64, update, 1e-6, "previous"), {}, TOLERANCE["float32"])
    assert verdict.answers_as == "previous"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.1))
def test_a_trainer_that_rounds_as_much_does_not_condemn_either(seed: int, update: float) -> None:
    # In bfloat16 most of the difference between the trainer's two answers may be its own rounding.
    expected, alternatives, served = answers(seed, 256, update, 0.05, "checkpoint")
    random = np.random.default_rng(seed + 1)
    expected, *others = (numbers + random.normal(0, 0.05, 256) for numbers in (expected, *alternatives.values()))
    verdict = judge(expected, dict(zip(alternatives, others, strict=True)), served, {}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == "checkpoint"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(2e-4, 0.1), st.booleans())
def test_weights_that_were_not_applied_are_seen_below_any_rounding(seed: int, update: float, applied: bool) -> None:
    expected, alternatives, served = answers(seed, 64, update, 0.05, "checkpoint" if applied else "previous")
    # The server's rounding changes with the weights, and only with them.
    own = answers(seed + 1, 64, update, 0.05, "previous")[2] if applied else served
    verdict = judge(expected, alternatives, served, {"previous": own}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == ("checkpoint" if applied else "previous")


def test_equal_weights_can_not_be_told_apart() -> None:
    expected, alternatives, served = answers(0, 64, 0.0, 1e-6, "checkpoint")
    verdict = judge(expected, alternatives, served, {}, TOLERANCE["float32"])
    assert verdict.answers_as == "checkpoint"
    assert verdict.shares["previous"] is None
    assert verdict.shares["base"] == pytest.approx(1)


def test_nan_is_no_answer() -> None:
    expected, alternatives, served = answers(0, 64, 0.1, 1e-6, "checkpoint")
    served[5] = np.nan
    assert judge(expected, alternatives, served, {}, TOLERANCE["float32"]).answers_as == "something else"
