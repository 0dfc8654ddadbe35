"""The process in which agents are played: hundreds at once, each a coroutine.

Agents may do anything here: block it, kill it, fork it. So it keeps nothing: it tells its supervisor
(`steps.agent.supervisor`) which attempts it has begun and what each has come to, in blocking writes, so that what it
told is known even if it is killed at the next moment.
"""

import asyncio
import os
import pickle
import selectors
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from environments.base import Task, Trajectory
from steps.agent.keeper import open_files
from steps.agent.limits import RolloutLimits
from steps.agent.play import Venue, play
from steps.common.errors import NightschoolError

PULSE = 1.0
"""Most seconds between two signs of life."""
HEAD = 8
"""Bytes of a message's length, before it."""


class Job(NamedTuple):
    """An attempt to be played."""

    task: int
    """Its index in the shard."""
    attempt: int
    tries: int = 0
    """That have failed already."""


@dataclass(frozen=True)
class Ready:
    """The environment is loaded; `open_files` are the worker's before any attempt."""

    pid: int
    open_files: int


@dataclass(frozen=True)
class Begun:
    """From now on the attempt may be whose fault it is."""

    job: Job


@dataclass(frozen=True)
class Played:
    """An attempt has come to its end; with `open_files`, where it failed: perhaps for want of more."""

    job: Job
    trajectory: Trajectory
    open_files: int


@dataclass(frozen=True)
class Pulse:
    """The event loop turns."""

    requests: int
    notices: Counter[str]


@dataclass(frozen=True)
class Lost:
    """The shard can't go on."""

    error: Exception
    open_files: int


Message = Ready | Begun | Played | Pulse | Lost
OpenVenue = Callable[[], AbstractAsyncContextManager[Venue]]


class Line:
    """To the supervisor."""

    def __init__(self, end: socket.socket) -> None:
        self.stopped = False
        """Has the supervisor asked the worker to end?"""
        self._socket, self._pid = end, os.getpid()

    def tell(self, message: Message) -> None:
        """Returns once the message is on its way; ends a process that an agent has forked, which has nothing to say."""
        if os.getpid() != self._pid:
            os._exit(0)
        content = pickle.dumps(message)
        self._socket.sendall(len(content).to_bytes(HEAD) + content)

    def when_stopped(self, stop: Callable[[], object]) -> None:
        """Has `stop` called when that is so."""
        loop = asyncio.get_running_loop()

        def once() -> None:
            loop.remove_reader(self._socket)
            self.stopped = True
            stop()

        loop.add_reader(self._socket, once)


class OwnSelector(selectors.EpollSelector):
    """Ends a process that an agent has forked and that comes back to our loop, whose sockets it would share with us."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._pid:
            os._exit(0)
        return super().select(timeout)


def work(
    end: socket.socket, open_venue: OpenVenue, tasks: Sequence[Task], jobs: Sequence[Job], limits: RolloutLimits
) -> int:
    """Plays `jobs` and tells of them; returns the exit status."""
    loop = asyncio.SelectorEventLoop(OwnSelector())
    # A fork in an agent copies the whole loop. Others' turns are not the copy's: it gets to the selector at most.
    os.register_at_fork(after_in_child=loop._ready.clear)  # type: ignore[attr-defined]
    _run(loop, _work(Line(end), open_venue, tasks, jobs, limits), limits.teardown_timeout)
    return 0


async def _work(
    line: Line, open_venue: OpenVenue, tasks: Sequence[Task], jobs: Sequence[Job], limits: RolloutLimits
) -> None:
    this = asyncio.current_task()
    assert this is not None
    line.when_stopped(this.cancel)
    slots = asyncio.Semaphore(limits.concurrency)
    try:
        async with open_venue() as venue:
            line.tell(Ready(os.getpid(), open_files(os.getpid())))
            pulse = asyncio.create_task(_beat(line, venue))
            async with asyncio.TaskGroup() as attempts:
                for job in jobs:
                    attempts.create_task(_play(line, venue, tasks[job.task], job, slots))
            pulse.cancel()
            line.tell(Pulse(venue.upstream.requests, venue.notices.counts))
    except asyncio.CancelledError:
        if not line.stopped:
            raise
    except Exception as error:  # All there is: the supervisor raises it.
        line.tell(Lost(_sendable(_first(error)), open_files(os.getpid())))


async def _play(line: Line, venue: Venue, task: Task, job: Job, slots: asyncio.Semaphore) -> None:
    async with slots:
        line.tell(Begun(job))
        trajectory = await play(venue, task, job.attempt, job.tries)
        line.tell(Played(job, trajectory, open_files(os.getpid()) if trajectory.failure else 0))


async def _beat(line: Line, venue: Venue) -> None:
    while True:
        line.tell(Pulse(venue.upstream.requests, venue.notices.counts))
        await asyncio.sleep(min(PULSE, venue.limits.block_timeout / 4))


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None], grace: float) -> None:
    """Like `asyncio.run`, but whatever an agent left running is waited for no longer than `grace` seconds."""
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=grace))
        loop.close()


def _first(error: BaseException) -> BaseException:
    """The first error; what came after it was cancelled by it, or is the same again."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _sendable(error: BaseException) -> Exception:
    if isinstance(error, NightschoolError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)).rstrip())
