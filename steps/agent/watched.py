"""A worker as its supervisor sees it: what it tells, what it prints, and whether it keeps the limits of a process."""

import os
import pickle
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from environments.base import Failure
from steps.agent.keeper import Kept, open_files
from steps.agent.limits import RolloutLimits
from steps.agent.worker import HEAD, Begun, Job, Lost, Message, Played, Pulse, Ready

CHUNK, CHUNKS = 1 << 16, 16
"""Bytes that are read at once, and how often at most before others get their turn."""
LOOK = 1.0
"""Seconds between looks at files and processes. A longer silence counts as this long: we were kept from hearing."""
SPARE_FILES = 100
"""Of those that the system allows a process: for what is no agent's."""
LAST = 4000
"""Bytes of standard error that are kept with a failure."""
DUMPING = 0.2
"""Seconds that a blocked worker gets to write down where it is."""


class Watched:
    """A worker that plays `jobs`."""

    def __init__(self, kept: Kept, jobs: Sequence[Job], limits: RolloutLimits) -> None:
        self.jobs, self.unfinished = jobs, set(jobs)
        self.begun: dict[Job, float] = {}
        """When, on the monotonic clock."""
        self.offence: Failure | None = None
        """The limit that it broke, and was killed for."""
        self.lost: Exception | None = None
        """Why it gave up."""
        self.ended = False
        self.requests, self.notices = 0, Counter[str]()
        self._kept, self._limits = kept, limits
        self._ready: Ready | None = None
        self._unread, self._printed = b"", Printed(limits.output_bytes)
        self._news: list[Played] = []
        self._looked = self._counted = time.monotonic()
        self._silent, self._status, self._where = 0.0, 0, ""

    def descriptors(self) -> tuple[int, ...]:
        """Readable when there is something new."""
        return self._kept.line.fileno(), self._kept.out, self._kept.err, self._kept.ended

    def take(self) -> list[Played]:
        """What was played since the last time."""
        news, self._news = self._news, []
        return news

    def look(self) -> None:
        """Hears the worker, and kills it where it breaks a limit."""
        now = time.monotonic()
        self._silent += min(now - self._looked, LOOK)
        self._looked = now
        self.ended = bool(select.select([self._kept.ended], [], [], 0)[0])
        for message in self._messages():
            self._silent = 0.0
            self._hear(message)
        for stream, descriptor in ((1, self._kept.out), (2, self._kept.err)):
            for chunk in self._read(descriptor):
                self._printed.add(stream, chunk)
        if now - self._counted > LOOK:
            self._counted = now
            self._count()
        self._check_silence_and_output()

    def ask_to_end(self) -> None:
        """Its agents may clean up."""
        with suppress(OSError):
            self._kept.line.send(b"!")

    def close(self) -> None:
        """Ends it, where it has not ended."""
        self._where = self._kept.traceback() or self._printed.last.decode(errors="replace")
        self._status = self._kept.close()
        self._printed.close()

    def verdict(self) -> Failure:
        """Why it ended before it had played all. Call it after `close`."""
        return replace(self.offence or Failure("ProcessKilled", _ended_by(self._status)), traceback=self._where)

    def seconds(self, job: Job) -> float:
        """Since the attempt began."""
        return time.monotonic() - self.begun[job]

    def _messages(self) -> Iterator[Message]:
        for chunk in self._read(self._kept.line.fileno()):
            self._unread += chunk
            while len(self._unread) >= HEAD:
                end = HEAD + int.from_bytes(self._unread[:HEAD])
                if len(self._unread) < end:
                    break
                content, self._unread = self._unread[HEAD:end], self._unread[end:]
                yield pickle.loads(content)

    def _hear(self, message: Message) -> None:
        match message:
            case Ready():
                self._ready = message
            case Begun(job):
                self.begun[job] = time.monotonic()
            case Pulse(requests, notices):
                self.requests, self.notices = requests, notices
            case Lost(error, files):
                self._check_files(files)
                self.lost = error
            case Played(job, trajectory, files):
                self._check_files(files)
                # A failure may be due to another, who took all files; a success is one.
                if not (trajectory.failure and self.offence):
                    self.unfinished.remove(job)
                    self._news.append(message)

    def _read(self, descriptor: int) -> Iterator[bytes]:
        """What is there; from a worker that has not ended, a bounded amount."""
        left = CHUNKS
        while left or self.ended:
            try:
                chunk = os.read(descriptor, CHUNK)
            except (BlockingIOError, ConnectionResetError):
                return
            if not chunk:
                return
            yield chunk
            left -= 1

    def _count(self) -> None:
        if self._ready is None or self.ended:
            return
        self._check_files(open_files(self._ready.pid))
        running, most = len(self._kept.processes()) - 1, self._limits.processes
        if running > most * max(1, len(self.begun.keys() & self.unfinished)):
            self._offend("TooManyProcesses", f"has more than {most} processes running", "processes")

    def _check_files(self, files: int) -> None:
        """So many are open, those of attempts that are over included."""
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_FILES
        own, most = self._ready.open_files if self._ready else 0, min(self._limits.open_files, allowed)
        if files > min(own + most * max(1, len(self.begun)), allowed):
            self._offend("TooManyFiles", f"has more than {most} files and sockets open", "open_files")

    def _check_silence_and_output(self) -> None:
        limits = self._limits
        if self._printed.count > limits.output_bytes * max(1, len(self.begun)):
            self._offend("TooMuchOutput", f"printed more than {limits.output_bytes:,} bytes", "output_bytes")
        if self._ready and not self.ended and self._silent > limits.block_timeout:
            with suppress(ProcessLookupError):
                os.kill(self._ready.pid, signal.SIGUSR1)
            time.sleep(DUMPING)
            self._offend("Blocked", f"let nothing else run for {limits.block_timeout:g} s", "block_timeout")

    def _offend(self, kind: str, what: str, limit: str) -> None:
        """Without what was measured: equal offences are counted together."""
        if self.offence is None:
            self.offence = Failure(kind, f"the agent {what}: rollout.limits.{limit}")
            self._kept.kill()


class Printed:
    """What a worker prints: passed on, line by line, up to so many bytes, and counted."""

    def __init__(self, most: int) -> None:
        self.count, self.last = 0, b""
        """Bytes; the end of standard error."""
        self._most = most
        self._unfinished = {1: b"", 2: b""}

    def add(self, stream: int, chunk: bytes) -> None:
        """What arrives of standard output (1) or error (2)."""
        shown = chunk[: max(0, self._most - self.count)]
        self.count += len(chunk)
        if stream == 2:
            self.last = (self.last + chunk)[-LAST:]
        *lines, self._unfinished[stream] = (self._unfinished[stream] + shown).split(b"\n")
        _print(stream, lines)

    def close(self) -> None:
        """Passes on what has no end of line, and says what was left out."""
        for stream, rest in self._unfinished.items():
            _print(stream, [rest] if rest else [])
        if (hidden := self.count - self._most) > 0:
            print(f"{hidden:,} bytes more were printed, and are not shown (rollout.limits.output_bytes)", flush=True)


def _print(stream: int, lines: Sequence[bytes]) -> None:
    for line in lines:
        print(line.decode(errors="replace"), file=sys.stdout if stream == 1 else sys.stderr, flush=True)


def _ended_by(status: int) -> str:
    if status <= 128:
        return f"the agent's process ended with status {status}"
    guess = ": by the agent, or since the machine ran out of memory" if status == 128 + signal.SIGKILL else ""
    return f"the agent's process ended by signal {status - 128}{guess}"
