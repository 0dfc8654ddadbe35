"""Has attempts played in processes that agents may ruin, and finds out which agent did.

All attempts are played in one worker, as coroutines. A worker that dies, or breaks one of the limits that concern a
whole process, is killed with all that it has started. The attempts that it had begun are played again by several
workers with a share each, and so on until the one that ruins its worker is alone in it: it gets its fresh tries, and is
then a failed rollout. The others get their results. What was played is kept, and what was not begun comes last.
"""

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence

from environments.base import Failure, Task, Trajectory
from steps.agent.keeper import Kept
from steps.agent.limits import RolloutLimits
from steps.agent.watched import Watched
from steps.agent.worker import Job
from steps.common.errors import StepFailed

SHARES = 8
"""Into how many workers the suspects are divided; also the most workers at a time."""
LOOK = 0.5
"""Most seconds between two looks at the workers."""
PATIENCE = 5.0
"""Seconds that a worker which is asked to end gets beyond what agents may take to clean up."""


class Supervisor:
    """Plays the attempts at `tasks`. `start` forks a worker for some of them."""

    def __init__(self, start: Callable[[Sequence[Job]], Kept], tasks: Sequence[Task], limits: RolloutLimits) -> None:
        self.killed = self.requests = 0
        self.notices: Counter[str] = Counter()
        self._start, self._tasks, self._limits = start, tasks, limits
        self._waiting: deque[Sequence[Job]] = deque()
        self._workers: list[Watched] = []

    def play(self, jobs: Sequence[Job]) -> Generator[tuple[Job, Trajectory]]:
        """Each attempt's trajectory, as it comes. Close the iterator: that ends the workers.

        Raises `ServerFault`, `InvalidInputs` and `StepFailed`.
        """
        if jobs:
            self._waiting.append(jobs)
        try:
            while self._waiting or self._workers:
                self._start_what_fits()
                for worker in self._look():
                    yield from ((played.job, played.trajectory) for played in worker.take())
                    if worker.ended:
                        yield from self._conclude(worker)
        finally:
            self._stop()

    def _start_what_fits(self) -> None:
        """Together they play no more attempts at once than one does."""
        most = self._limits.concurrency
        while self._waiting and len(self._workers) < SHARES:
            sizes = [min(len(jobs), most) for jobs in (self._waiting[0], *(w.jobs for w in self._workers))]
            if self._workers and sum(sizes) > most:
                return
            jobs = self._waiting.popleft()
            self._workers.append(Watched(self._start(jobs), jobs, self._limits))

    def _look(self) -> list[Watched]:
        """All workers, once there is something new or it is time."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (d for worker in self._workers if not worker.ended for d in worker.descriptors()):
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(LOOK)
        for worker in self._workers:
            worker.look()
        return list(self._workers)

    def _conclude(self, worker: Watched) -> Iterator[tuple[Job, Trajectory]]:
        """Settles a worker that has ended: what it leaves unfinished is played by others, or has failed."""
        self._workers.remove(worker)
        worker.close()
        self.requests += worker.requests
        self.notices += worker.notices
        if worker.lost and not worker.offence:
            raise worker.lost
        if worker.unfinished:
            self.killed += 1
            yield from self._divide(worker, worker.verdict())

    def _divide(self, worker: Watched, failure: Failure) -> Iterator[tuple[Job, Trajectory]]:
        suspects = [job for job in worker.unfinished if job in worker.begun]
        others = [job for job in worker.unfinished if job not in worker.begun]
        if len(worker.unfinished) == len(worker.jobs) and not suspects:
            raise StepFailed(f"the environment's process ended before any rollout: {failure.message}")
        if len(worker.jobs) == 1:
            yield from self._convict(suspects[0], failure, worker.seconds(suspects[0]))
            return
        text = f"{len(suspects)} rollouts were at work, and are played again apart to find which of them it was"
        print(f"{failure.type}: {failure.message}; {text}", flush=True)
        size = max(1, -(-len(suspects) // SHARES))
        self._waiting.extendleft(suspects[first : first + size] for first in range(0, len(suspects), size))
        if others:
            self._waiting.append(others)

    def _convict(self, job: Job, failure: Failure, seconds: float) -> Iterator[tuple[Job, Trajectory]]:
        """Alone in its worker, it was it."""
        if job.tries < self._limits.agent_retries:
            self._waiting.appendleft([job._replace(tries=job.tries + 1)])
            return
        name = self._tasks[job.task].id
        yield job, Trajectory(name, job.attempt, [], [], None, failure=failure, seconds=round(seconds, 3))

    def _stop(self) -> None:
        """Ends workers that still play, and lets their agents clean up."""
        for worker in self._workers:
            worker.ask_to_end()
        end = time.monotonic() + self._limits.teardown_timeout + PATIENCE
        try:
            while time.monotonic() < end and not all(worker.ended for worker in self._workers):
                self._look()
        finally:
            for worker in self._workers:
                worker.close()
