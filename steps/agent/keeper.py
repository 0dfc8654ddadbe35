"""A forked process that leaves nothing behind, whatever is done in it.

    we ── keeper ── worker ── whatever is started there

The keeper only waits. The kernel gives it the orphans among its descendants (PR_SET_CHILD_SUBREAPER), so it finds
those, too, who forked twice or took a session of their own. When the worker ends, or we do, however that happens, it
ends them all. Linux only.
"""

import ctypes
import errno
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Never, TextIO

from steps.common.warm import PR_SET_NAME, die_with

PR_SET_CHILD_SUBREAPER = 36
REAPING = 1000
"""Milliseconds between looks for orphans that have ended."""
CLOSING = 10.0
"""Seconds that killed processes may take to end."""


class Kept:
    """A worker and its keeper, seen from where they were forked.

    `work` gets one end of `line`, a stream socket. What it prints arrives at `out` and `err`; its return value is the
    worker's exit status. `ended` is readable once nobody is left.
    """

    def __init__(self, work: Callable[[socket.socket], int]) -> None:
        self.line, line = socket.socketpair()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self._traceback, self._order, us = os.memfd_create("traceback"), os.eventfd(0), os.pidfd_open(os.getpid())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the worker would print it again
        self._keeper = os.fork()
        if self._keeper == 0:
            _keep(lambda: _become_worker(lambda: work(line), out, err, self._traceback), self._order, us)
        self.ended = os.pidfd_open(self._keeper)
        for descriptor in (line.detach(), out, err, us):
            os.close(descriptor)
        for descriptor in (self.line.fileno(), self.out, self.err):
            os.set_blocking(descriptor, False)

    def kill(self) -> None:
        """Ends the worker and all that it has started, at once."""
        os.eventfd_write(self._order, 1)

    def processes(self) -> list[int]:
        """The ids of the worker and of all that it has started."""
        return descendants(self._keeper)

    def traceback(self) -> str:
        """Where the worker's threads were when it crashed, or was sent SIGUSR1; empty where neither happened."""
        text = os.pread(self._traceback, 1 << 20, 0).decode(errors="replace")
        return text.partition(f'  File "{__file__}"')[0]  # below is how the worker came to be

    def close(self) -> int:
        """Ends what is left, waits for it, and returns the worker's exit status; 128 + n where signal n ended it."""
        self.kill()
        select.select([self.ended], [], [], CLOSING)
        pid, status = os.waitpid(self._keeper, os.WNOHANG)
        for descriptor in (self.line.detach(), self.out, self.err, self._traceback, self._order, self.ended):
            os.close(descriptor)
        if not pid:
            print(f"warning: process {self._keeper} has not ended {CLOSING:g} s after it was killed", file=sys.stderr)
        return os.waitstatus_to_exitcode(status)


def _keep(work: Callable[[], Never], order: int, us: int) -> Never:
    """The keeper, from its first to its last moment."""
    status = 1
    try:
        os.setsid()  # Ctrl-C is for us to handle
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"keeper", 0, 0, 0)  # as `top` shows it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        keeper = os.getpid()
        worker = os.fork()
        if worker == 0:
            die_with(keeper)
            work()
        status = _wait(worker, order, us)
        _end_all(worker)
    except BaseException:
        traceback.print_exc()  # our caller's stack is not ours to unwind
    finally:
        os._exit(status)


def _wait(worker: int, order: int, us: int) -> int:
    """Until the worker ends, we do, or it is to be killed; returns its exit status, and reaps orphans meanwhile."""
    poll = select.poll()
    for descriptor in (order, us, os.pidfd_open(worker)):
        poll.register(descriptor, select.POLLIN)
    while True:
        if {order, us} & {descriptor for descriptor, _ in poll.poll(REAPING)}:
            os.kill(worker, signal.SIGKILL)
            return 128 + signal.SIGKILL
        # The worker itself is left to be reaped in the end: until then its number, and its group's, is its own.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == worker:
                return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
            os.waitpid(ended.si_pid, 0)


def _end_all(worker: int) -> None:
    """Whoever forks while he is killed leaves orphans, and they come to us: until there is nobody."""
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # at one blow, which a swarm does not outrun
    with suppress(ChildProcessError):
        while True:
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _become_worker(work: Callable[[], int], out: int, err: int, crash: int) -> Never:
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"agents", 0, 0, 0)
        for descriptor, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdout, sys.stderr = stdout, _ = _lines(1), _lines(2)
        faulthandler.enable(crash)
        faulthandler.register(signal.SIGUSR1, crash)
        status = work()
        stdout.flush()
    except BaseException:
        traceback.print_exc()  # our caller's stack is not ours to unwind
    finally:
        os._exit(status)


def _lines(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def open_files(pid: int) -> int:
    """How many files and sockets a process has open; 0 where it has ended."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError as error:
        # To look takes one, too.
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else 0


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, but for those that have ended."""
    families: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = (process / "stat").read_text().rpartition(") ")[2].split()[:2]
            if state != "Z":
                families.setdefault(int(parent), []).append(int(process.name))
    found: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for parent in generation for child in families.get(parent, ())]
        found += generation
    return found
