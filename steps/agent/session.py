"""A step's time at the server: the tasks are played in a worker, which has all that rollouts need, and kept here."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import ClassVar

from pydantic import Field, field_validator

from environments.base import Task, TrajectoryGroup
from steps.agent.foreign import line_to
from steps.agent.gateway import Gateway
from steps.agent.keeper import Kept
from steps.agent.limits import RolloutLimits
from steps.agent.plain_recorder import PlainRecorder
from steps.agent.play import Venue
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.shard import GroupStore, Shard
from steps.agent.supervisor import Supervisor
from steps.agent.upstream import Endpoint
from steps.agent.worker import Job, work
from steps.common.settings import EnvironmentSettings, SamplingSettings
from steps.common.step import Inputs, Workspace


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
    them), `ServerFault`, and `StepFailed` where the environment ends its process before it plays.
    """
    endpoint, started = inputs.endpoint(), time.monotonic()
    store = GroupStore(workspace.root, workspace.path, inputs.fingerprint(), iteration, shard)
    books = Shard(store, inputs.tasks, group_size, inputs.max_failed_fraction)

    def start(jobs: Sequence[Job]) -> Kept:
        return Kept(lambda line: work(line, lambda: _venue(inputs, endpoint, seed), inputs.tasks, jobs, inputs.limits))

    supervisor = Supervisor(start, inputs.tasks, inputs.limits)
    with closing(supervisor.play(books.missing())) as played:
        for job, trajectory in played:
            books.add(job, trajectory)
    seconds = time.monotonic() - started
    workspace.measured |= {
        "requests": supervisor.requests,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(books.tally.sampled / seconds, 1),
        "killed_workers": supervisor.killed,
        **{f"warned_{subject}": count for subject, count in sorted(supervisor.notices.items())},
    }
    return books.groups()


@asynccontextmanager
async def _venue(inputs: PlayInputs, endpoint: Endpoint, seed: str) -> AsyncIterator[Venue]:
    """All that attempts need, in the worker."""
    environment, notices = inputs.environment.load(), Notices()
    recorder = Recorder if endpoint.exact else PlainRecorder
    async with line_to(endpoint, inputs.limits, notices) as upstream, Gateway(endpoint.model) as gateway:
        yield Venue(environment, upstream, gateway, inputs.sampling, inputs.limits, notices, seed, recorder)
