"""One attempt at one task, from its first try to a trajectory, whatever goes wrong.

What the agent does wrong (it raises, takes too long, gives no finite reward) is tried again `agent_retries` times and
then kept as a failed trajectory. What the server does wrong is tried again `server_retries` times and then ends the
shard. Each try starts afresh: its own task, recorder, policy and address.

What an agent does to the whole process (it blocks or kills it, floods the log) is for `steps.agent.supervisor` to see.
"""

import asyncio
import json
import math
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from environments.base import Environment, Failure, Policy, Result, Task, Trajectory
from steps.agent.calls import Calls
from steps.agent.gateway import Gateway
from steps.agent.limits import RolloutLimits
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.upstream import Upstream
from steps.common.errors import NightschoolError, ServerFault
from steps.common.settings import SamplingSettings

WAIT_FOR_SERVER = 1.0
LARGEST_REWARD = 1e6
"""Advantages are float32, which holds seven digits: beside a larger reward the differences of others get lost."""
LONGEST_MESSAGE, LONGEST_TRACEBACK = 2_000, 50_000
"""Characters."""


@dataclass(frozen=True)
class Venue:
    """Where attempts are played, and how the policy samples there."""

    environment: Environment
    upstream: Upstream
    gateway: Gateway
    sampling: SamplingSettings
    limits: RolloutLimits
    notices: Notices
    seed: str
    """Names the occasion: equal seeds, equal samples."""
    recorder: type[Recorder] = Recorder


async def play(venue: Venue, task: Task, attempt: int, tries: int = 0) -> Trajectory:
    """Plays until there is a reward or no retry is left; so many `tries` have failed already.

    Raises `ServerFault`, and `InvalidInputs` from the server.
    """
    faults = 0
    while True:
        try:
            trajectory = await _try(venue, task, attempt, tries)
        except ServerFault:
            if faults == venue.limits.server_retries:
                raise
            faults += 1
            await asyncio.sleep(WAIT_FOR_SERVER)
            continue
        if trajectory.failure is None or tries == venue.limits.agent_retries:
            return trajectory
        tries += 1


async def _try(venue: Venue, task: Task, attempt: int, number: int) -> Trajectory:
    # A new try samples anew: the same tokens would fail the same way.
    seed = f"{venue.seed}/{task.id}/{attempt}/{number}"
    recorder = venue.recorder(venue.upstream, venue.sampling, seed, venue.notices)
    calls = Calls(recorder.complete, venue.limits.calls)
    started = time.monotonic()
    with venue.gateway.open(calls.complete) as policy:
        outcome = await _bounded(_attempt(venue.environment, task, policy), calls, venue)
        calls.close()
        recorder.close()
        await policy.close()
    seconds = round(time.monotonic() - started, 3)
    if isinstance(calls.fault, NightschoolError):
        raise calls.fault
    if calls.fault:
        outcome = _failure(calls.fault)
    return _judged(replace(recorder.trajectory(task.id, attempt), seconds=seconds), outcome)


async def _attempt(environment: Environment, task: Task, policy: Policy) -> Result | Failure:
    own = task.model_copy(deep=True)
    try:
        result = await environment.rollout(own, policy)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # Whatever an agent raises is its result; it is kept whole, in the trajectory.
        return _failure(error)
    if own != task:
        return Failure("TaskChanged", "the rollout changed its task, which all attempts share: copy what you change")
    return _checked(result)


def _checked(result: object) -> Result | Failure:
    if not isinstance(result, Result):
        return Failure("NoResult", f"the rollout returned {type(result).__name__}, not a Result")
    if not abs(result.reward) <= LARGEST_REWARD:
        return Failure("BadReward", f"the reward is {result.reward}, no number of at most ±{LARGEST_REWARD:,.0f}")
    if bad := [name for name, value in result.metrics.items() if not math.isfinite(value)]:
        return Failure("BadMetric", f"the metric {bad[0]!r} is {result.metrics[bad[0]]}")
    return result


async def _bounded(attempt: Coroutine[Any, Any, Result | Failure], calls: Calls, venue: Venue) -> Result | Failure:
    """The attempt's outcome within the time limit; an agent that does not stop when cancelled is left behind."""
    limits = venue.limits
    work = asyncio.create_task(attempt)
    try:
        either: set[asyncio.Future[Any]] = {work, calls.over}
        await asyncio.wait(either, timeout=limits.rollout_timeout, return_when=asyncio.FIRST_COMPLETED)
        if calls.fault:
            return _failure(calls.fault)
        if work.cancelled():
            return Failure("CancelledError", "the agent cancelled itself")
        if work.done():
            return work.result()
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=limits.teardown_timeout)
            if not work.done():
                text = f"an agent had not stopped {limits.teardown_timeout:g} s after it was cancelled"
                venue.notices.warn("teardown", text)
    if not venue.upstream.healthy:
        raise ServerFault("the policy's server has not answered for the whole time that a rollout may take")
    return Failure("RolloutTimeout", f"no result after {limits.rollout_timeout:g} s")


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        message = str(error)
    except Exception as worse:  # its own, and it may do anything
        message = f"its message can't be told: {type(worse).__name__}"
    return Failure(type(error).__name__, _writable(message, LONGEST_MESSAGE), _writable(text, LONGEST_TRACEBACK))


def _writable(text: str, most: int) -> str:
    """Halves of characters have no UTF-8."""
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= most else f"{whole[: most // 2]} … {whole[-most // 2 :]}"


def _judged(recorded: Trajectory, outcome: Result | Failure) -> Trajectory:
    """With its worth, and nothing in it but JSON: it leaves this process."""
    try:
        recorded = replace(recorded, messages=_json(recorded.messages))
        metadata = {} if isinstance(outcome, Failure) else _json(outcome.metadata)
    except Exception as error:  # an object's own `__str__` may do anything
        return replace(recorded, messages=[], failure=_failure(error))
    if isinstance(outcome, Failure):
        return replace(recorded, failure=outcome)
    metrics = {name: float(value) for name, value in outcome.metrics.items()}
    return replace(recorded, reward=float(outcome.reward), metrics=metrics, metadata=metadata)


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
