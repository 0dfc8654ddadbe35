"""Agents that do to their process what they should not, one for each way, and one that is innocent."""

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import Environment, Policy, Result, Split, Task

OURS = os.getpid()
HELD: list[Any] = []
"""What agents leave open."""


class Unloadable(Environment):
    """Ends the process that loads it, but for the first."""

    def model_post_init(self, context: Any) -> None:
        if os.getpid() != OURS:
            os._exit(7)

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id="a"), Task(id="b")]


class Hostile(Environment):
    """A task for each of `ways`, between as many innocent ones as `innocent` says."""

    ways: list[str]
    innocent: int = 6
    folder: str = ""
    """Where agents leave the ids of the processes that they start."""

    def tasks(self, split: Split) -> Sequence[Task]:
        hostile = [Task(id=way, data={"way": way, "list": [1]}) for way in self.ways]
        innocent = [Task(id=f"innocent-{i}", data={"way": "innocently"}) for i in range(self.innocent)]
        return [*innocent[::2], *hostile, *innocent[1::2]]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        await policy.chat([{"role": "user", "content": task.id}])
        result = await getattr(self, task.data["way"])(task, policy)
        return result if isinstance(result, Result) else Result(reward=result or 0.0)

    async def innocently(self, task: Task, policy: Policy) -> float:
        for turn in range(3):
            await policy.chat([{"role": "user", "content": f"{task.id}: turn {turn}"}])
            await asyncio.sleep(0.05)
        print(task.id, "is done")
        return 1.0

    async def sleeps(self, task: Task, policy: Policy) -> None:
        time.sleep(3600)

    async def spins(self, task: Task, policy: Policy) -> None:
        while True:
            pass

    async def waits(self, task: Task, policy: Policy) -> None:
        await asyncio.get_running_loop().create_future()

    async def exits(self, task: Task, policy: Policy) -> None:
        os._exit(3)

    async def kills(self, task: Task, policy: Policy) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def kills_once(self, task: Task, policy: Policy) -> float:
        if not Path(self.folder, "killed").exists():
            Path(self.folder, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not Path(self.folder, "killed twice").exists():
            Path(self.folder, "killed twice").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    async def crashes(self, task: Task, policy: Policy) -> None:
        ctypes.string_at(0)

    async def interrupts(self, task: Task, policy: Policy) -> None:
        async def interrupt() -> None:
            raise KeyboardInterrupt

        await asyncio.gather(asyncio.create_task(interrupt()))

    async def cancels_all(self, task: Task, policy: Policy) -> None:
        for other in asyncio.all_tasks():
            other.cancel()

    async def prints(self, task: Task, policy: Policy) -> None:
        for _ in range(1 << 29):
            print("x")

    async def shouts(self, task: Task, policy: Policy) -> None:
        while True:
            os.write(2, b"y\n" * (1 << 15))
            await asyncio.sleep(0)

    async def forks(self, task: Task, policy: Policy) -> None:
        """Daemons: forked twice, each in a session of its own."""
        for number in range(30):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    Path(self.folder, f"{task.id}-{number}").write_text(str(os.getpid()))
                    time.sleep(3600)
                os._exit(0)
        await asyncio.sleep(3600)

    async def splits(self, task: Task, policy: Policy) -> float:
        """A fork that comes back to the loop, and goes on to play."""
        child = os.fork()
        if child:
            Path(self.folder, task.id).write_text(str(child))
        await policy.chat([{"role": "user", "content": "from both" if child else "from the child"}])
        return 1.0 if child else 2.0

    async def leaves_a_child(self, task: Task, policy: Policy) -> float:
        process = await asyncio.create_subprocess_exec("sleep", "3600")
        Path(self.folder, task.id).write_text(str(process.pid))
        return 1.0

    async def opens(self, task: Task, policy: Policy) -> None:
        while True:
            HELD.append(Path("/dev/null").open())  # noqa: SIM115 (it is to leak)
            await asyncio.sleep(0)

    async def connects(self, task: Task, policy: Policy) -> None:
        while True:
            HELD.extend(socket.socketpair())
            await asyncio.sleep(0)

    async def hoards(self, task: Task, policy: Policy) -> float:
        return 1e308

    async def loses_count(self, task: Task, policy: Policy) -> float:
        return float("nan")

    async def measures_infinity(self, task: Task, policy: Policy) -> Result:
        return Result(reward=1, metrics={"speed": float("inf")})

    async def circles(self, task: Task, policy: Policy) -> Result:
        metadata: dict[str, Any] = {}
        metadata["self"] = metadata
        return Result.model_construct(reward=1.0, metrics={}, metadata=metadata)

    async def cheats(self, task: Task, policy: Policy) -> float:
        task.data["list"].append(2)
        return 1.0

    async def asks_on(self, task: Task, policy: Policy) -> float:
        for _ in range(10_000):
            await policy.chat([{"role": "user", "content": "again"}])
        return 1.0

    async def asks_whatever_comes(self, task: Task, policy: Policy) -> float:
        while True:
            try:
                await policy.chat([{"role": "user", "content": "and again"}])
            except BaseException:
                continue
