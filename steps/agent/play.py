"""One attempt at one task, from its first try to a trajectory, whatever goes wrong.

What the agent does wrong (it raises, takes too long, gives no finite reward) is tried again `agent_retries` times and
then kept as a failed trajectory. What the server does wrong is tried again `server_retries` times and then ends the
shard. Each try starts afresh: its own recorder, policy and address.

An agent that blocks this process (no `await` for minutes) can't be stopped from here: the step's own time limit does.
"""

import asyncio
import math
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from environments.base import Environment, Failure, Policy, Result, Task, Trajectory
from steps.agent.gateway import Gateway
from steps.agent.limits import RolloutLimits
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.upstream import Upstream
from steps.common.errors import NightschoolError, ServerFault
from steps.common.settings import SamplingSettings

WAIT_FOR_SERVER = 1.0


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


async def play(venue: Venue, task: Task, attempt: int) -> Trajectory:
    """Plays until there is a reward or no retry is left. Raises `ServerFault`, and `InvalidInputs` from the server."""
    tries, faults = 0, 0
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
    started = time.monotonic()
    with venue.gateway.open(recorder.complete) as policy:
        outcome = await _bounded(_attempt(venue.environment, task, policy), venue)
        recorder.close()
        await policy.close()
    seconds = round(time.monotonic() - started, 3)
    if isinstance(recorder.fault, NightschoolError):
        raise recorder.fault
    if recorder.fault:
        outcome = _failure(recorder.fault)
    return replace(recorder.trajectory(task.id, attempt), seconds=seconds, **_worth(outcome))


async def _attempt(environment: Environment, task: Task, policy: Policy) -> Result | Failure:
    try:
        result = await environment.rollout(task, policy)
    except (Exception, SystemExit) as error:
        # Whatever an agent raises is its result; it is kept whole, in the trajectory.
        return _failure(error)
    return _checked(result)


def _checked(result: object) -> Result | Failure:
    if not isinstance(result, Result):
        return Failure("NoResult", f"the rollout returned {type(result).__name__}, not a Result")
    if not math.isfinite(result.reward):
        return Failure("BadReward", f"the reward is {result.reward}")
    if bad := [name for name, value in result.metrics.items() if not math.isfinite(value)]:
        return Failure("BadMetric", f"the metric {bad[0]!r} is {result.metrics[bad[0]]}")
    return result


async def _bounded(attempt: Coroutine[Any, Any, Result | Failure], venue: Venue) -> Result | Failure:
    """The attempt's outcome within the time limit; an agent that does not stop when cancelled is left behind."""
    limits = venue.limits
    work = asyncio.create_task(attempt)
    try:
        await asyncio.wait({work}, timeout=limits.rollout_timeout)
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
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _worth(outcome: Result | Failure) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failure": outcome}
    return {"reward": outcome.reward, "metrics": outcome.metrics, "metadata": outcome.metadata}
