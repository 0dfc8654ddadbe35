"""A step's time at the server: everything that rollouts need is opened, the tasks are played, everything is closed."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from pydantic import Field, field_validator

from environments.base import Environment, Task, TrajectoryGroup
from steps.agent.foreign import line_to
from steps.agent.gateway import Gateway
from steps.agent.limits import RolloutLimits
from steps.agent.plain_recorder import PlainRecorder
from steps.agent.play import Venue
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.shard import GroupStore, Shard
from steps.agent.upstream import Endpoint
from steps.common.settings import EnvironmentSettings, SamplingSettings
from steps.common.step import Inputs, Workspace

ResultT = TypeVar("ResultT")


class PlayInputs(Inputs):
    """What playing needs, whatever it is for. The server's address comes by environment variables."""

    operational: ClassVar[frozenset[str]] = frozenset({"limits"})

    tasks: list[Task] = Field(min_length=1)
    environment: EnvironmentSettings
    sampling: SamplingSettings
    seed: int
    """Of the sampling: equal seeds, equal tokens, as far as the server's arithmetic is."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Of the rollouts: when more fail, the step does."""
    limits: RolloutLimits = RolloutLimits()

    @field_validator("tasks")
    @classmethod
    def _unique(cls, tasks: list[Task]) -> list[Task]:
        counts = Counter(task.id for task in tasks)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"the task {twice[0]!r} is there twice: a shard holds each task once")
        return tasks

    def endpoint(self) -> Endpoint:
        """Where the model is served. Raises `InvalidInputs`."""
        return Endpoint.from_environment()


def play_tasks(
    inputs: PlayInputs, workspace: Workspace, group_size: int, iteration: int | None, shard: int, seed: str
) -> list[TrajectoryGroup]:
    """Plays every task `group_size` times; groups that were finished before are not played again.

    `iteration` is that of the checkpoint that plays, where one does. Raises `InvalidInputs` (`TooManyFailures` among
    them) and `ServerFault`.
    """
    endpoint, environment = inputs.endpoint(), inputs.environment.load()
    store = GroupStore(workspace.root, workspace.path, inputs.fingerprint(), iteration, shard)
    work = _play(inputs, workspace, endpoint, environment, store, group_size, seed)
    return _run(work, inputs.limits.teardown_timeout)


async def _play(
    inputs: PlayInputs,
    workspace: Workspace,
    endpoint: Endpoint,
    environment: Environment,
    store: GroupStore,
    group_size: int,
    seed: str,
) -> list[TrajectoryGroup]:
    started, notices = time.monotonic(), Notices()
    recorder = Recorder if endpoint.exact else PlainRecorder
    async with line_to(endpoint, inputs.limits, notices) as upstream, Gateway(endpoint.model) as gateway:
        venue = Venue(environment, upstream, gateway, inputs.sampling, inputs.limits, notices, seed, recorder)
        shard = Shard(venue, store, inputs.tasks, group_size, inputs.max_failed_fraction)
        groups = await shard.play()
    seconds = time.monotonic() - started
    workspace.measured |= {
        "requests": upstream.requests,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(shard.tally.sampled / seconds, 1),
        **{f"warned_{subject}": count for subject, count in sorted(notices.counts.items())},
    }
    return groups


def _run(work: Coroutine[Any, Any, ResultT], grace: float) -> ResultT:
    """Like `asyncio.run`, but whatever an agent left running is waited for no longer than `grace` seconds."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=grace))
        loop.close()
