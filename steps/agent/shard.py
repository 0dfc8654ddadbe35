"""The books of a shard: what of its groups is played, and what failed. Each is committed as soon as it is finished.

A finished group is one small Parquet file in a hidden folder beside the shard's own, named by the inputs' fingerprint:

    rollouts/.003.1f0c3a9be277.groups/0017.parquet

A shard that was killed reads them and plays only the others. Once the shard's artifact is in place they are removed.
"""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from environments.base import Failure, Task, Trajectory, TrajectoryGroup
from steps.agent.worker import Job
from steps.common import layout, tables
from steps.common.errors import CorruptArtifact, TooManyFailures
from steps.common.progress import Progress
from steps.common.storage import write_atomically

SUFFIX = layout.GROUPS
FAILED = f"{layout.LOGS}/failed"
LONGEST_REASON = 300


class GroupStore:
    """The finished groups of one shard, by their index in it."""

    def __init__(self, root: Path, path: str, fingerprint: str, iteration: int | None, shard: int) -> None:
        target = root / path
        self.folder = target.with_name(f".{target.name}.{fingerprint[:12]}{SUFFIX}")
        self._failed = root / FAILED
        self._name = path.replace("/", "-")
        self._iteration, self._shard = iteration, shard

    def commit(self, index: int, group: TrajectoryGroup) -> None:
        """Makes a group durable."""
        write_atomically(self._file(index), self._parquet([group]))

    def read(self, index: int) -> TrajectoryGroup | None:
        """A group that was committed before. One that can't be read counts as unfinished, and is said so."""
        if not self._file(index).exists():
            return None
        try:
            return tables.groups_of_frame(tables.read([self._file(index)], tables.TRAJECTORY_COLUMNS))[0]
        except (CorruptArtifact, IndexError) as error:
            print(f"a finished group is damaged and will be played again: {error}", flush=True)
            return None

    def set_aside(self, groups: dict[int, TrajectoryGroup]) -> Path:
        """Moves groups out, for people to read and for the next attempt to play again."""
        number = sum(1 for _ in self._failed.glob(f"{self._name}.*.parquet"))
        file = self._failed / f"{self._name}.{number}.parquet"
        write_atomically(file, self._parquet(list(groups.values())))
        for index in groups:
            self._file(index).unlink(missing_ok=True)
        return file

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:04d}.parquet"

    def _parquet(self, groups: Sequence[TrajectoryGroup]) -> bytes:
        return tables.encode(tables.frame_of_groups(groups, self._iteration, self._shard))


class Tally:
    """What has been played so far, as progress shows it."""

    def __init__(self, total: int) -> None:
        self.done = self.failed = self.sampled = 0
        self._reward = 0.0
        self._progress = Progress(total, "rollouts")

    def add(self, trajectory: Trajectory) -> None:
        """Counts a trajectory and shows the progress."""
        self.done += 1
        self.failed += trajectory.failure is not None
        self.sampled += trajectory.completion_tokens
        self._reward += trajectory.reward or 0.0
        mean = self._reward / max(self.done - self.failed, 1)
        speed = self.sampled / (time.monotonic() - self._progress.started)
        facts = {"reward": f"{mean:.3f}", "speed": f"{speed:.0f} tokens/s", "failed": f"{self.failed}"}
        self._progress.show(self.done, **facts)


class Shard:
    """The groups of `tasks`, `group_size` attempts each."""

    def __init__(self, store: GroupStore, tasks: Sequence[Task], group_size: int, max_failed_fraction: float) -> None:
        self._store, self._tasks, self._group_size = store, tasks, group_size
        self._allowed = max_failed_fraction * len(tasks) * group_size
        self._groups = {index: group for index in range(len(tasks)) if (group := store.read(index))}
        self._failed = len(self._failures())
        self.tally = Tally((len(tasks) - len(self._groups)) * group_size)
        if self._groups:
            print(f"{len(self._groups)} of {len(tasks)} groups are finished already", flush=True)
        self._check()

    def missing(self) -> list[Job]:
        """The attempts of the groups that were not committed before."""
        return [
            Job(index, attempt)
            for index in range(len(self._tasks))
            if index not in self._groups
            for attempt in range(self._group_size)
        ]

    def add(self, job: Job, trajectory: Trajectory) -> None:
        """Takes an attempt in, and makes its group durable if it is the last. Raises `TooManyFailures`."""
        group = self._groups.setdefault(job.task, TrajectoryGroup(self._tasks[job.task], []))
        group.trajectories.append(trajectory)
        self.tally.add(trajectory)
        self._failed += trajectory.failure is not None
        self._check()
        if len(group.trajectories) == self._group_size:
            group.trajectories.sort(key=lambda trajectory: trajectory.attempt)
            self._store.commit(job.task, group)

    def groups(self) -> list[TrajectoryGroup]:
        """All of them, in the order of the tasks, once nothing is missing."""
        return [self._groups[index] for index in range(len(self._tasks))]

    def _check(self) -> None:
        if self._failed > self._allowed:
            raise self._too_many_failures()

    def _failures(self) -> list[Failure]:
        return [t.failure for group in self._groups.values() for t in group.trajectories if t.failure]

    def _too_many_failures(self) -> TooManyFailures:
        broken = {i: group for i, group in self._groups.items() if any(t.failure for t in group.trajectories)}
        file = self._store.set_aside(broken)
        reasons = Counter(f"{failure.type}: {' '.join(failure.message.split())}" for failure in self._failures())
        reason, count = reasons.most_common(1)[0]
        return TooManyFailures(
            f"{self._failed} of {len(self._tasks) * self._group_size} rollouts failed, {self._allowed:g} may; "
            f"most often ({count} times): {reason[:LONGEST_REASON]}; all of them with their tracebacks: {file}"
        )


def sweep_groups(root: Path) -> list[Path]:
    """Removes the group folders under `root` whose shard is finished; returns what it removed."""
    shards = {folder.with_name(folder.name.split(".")[1]) for folder in root.rglob(f".*{SUFFIX}") if folder.is_dir()}
    return [folder for shard in sorted(shards) for folder in sweep_shard(shard)]


def sweep_shard(shard: Path) -> list[Path]:
    """The same for the folder of one shard."""
    if not (shard / layout.MANIFEST).exists():
        return []
    left = sorted(shard.parent.glob(f".{shard.name}.*{SUFFIX}"))
    for folder in left:
        shutil.rmtree(folder)
    return left
