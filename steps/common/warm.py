"""The warm parent: imports heavy libraries once, then forks a process for each step it is asked to run.

A step's process is exactly `python -m steps.<name> …`, only without the seconds that importing torch takes. The parent
itself stays single-threaded and never computes, so that its forks are as clean as a fresh interpreter.

    python -m steps.common.warm trl peft                  # what to import before the first fork

Requests come as JSON lines on stdin, reports leave as JSON lines on stdout:

    {"id": 1, "argv": ["steps.train", "--root", …], "env": {…}}      run a module as a command
    {"id": 1, "kill": true}                                          end it, with whatever it started
    → {"id": 1, "pid": 4711}   {"id": 1, "line": "…"}   {"id": 1, "status": 0}       (-9: ended by signal 9)

Its end is its children's: at end of stdin it kills them, and the kernel does if it is killed itself. Linux only.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, TextIO

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
HARMLESS = {
    "jemalloc_bg_thd",  # an allocator's (in Arrow, in Polars), which holds its locks itself around a fork
    "polars-ooc-clea",  # removes what queries spilled to disk: it sleeps until one does, and the parent runs none
}
CHUNK = 1 << 16


@dataclass
class Child:
    """A step's process: its own group, its output on a pipe."""

    id: int
    pid: int
    pidfd: int
    output: int
    unfinished: bytes = b""
    """The start of a line whose end has not come yet."""


class WarmParent:
    """Forks on request and reports on its children, in one thread."""

    def __init__(self, reports: TextIO) -> None:
        self._reports = reports
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._unread = b""

    def serve(self) -> None:
        """Works until stdin ends, then kills what still runs."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        try:
            while self._handle(self._selector.select()):
                pass
        finally:
            for child in self._children.values():
                os.killpg(child.pid, signal.SIGKILL)

    def _handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> bool:
        for key, _ in ready:
            if key.data is None:
                if not self._read_requests():
                    return False
            elif key.data.id not in self._children:
                pass  # reaped a moment ago
            elif key.fd == key.data.pidfd:
                self._reap(key.data)
            elif self._pass_on(key.data) == b"":
                self._selector.unregister(key.fd)
        return True

    def _read_requests(self) -> bool:
        chunk = os.read(sys.stdin.fileno(), CHUNK)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["id"])
            else:
                self._start(request)
        return bool(chunk)

    def _start(self, request: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(self._reports.fileno())
            become_step(request["argv"], request["env"], writer, parent)
        os.setpgid(pid, pid)  # as the child does: whoever is first, from here on there is a group to kill
        os.close(writer)
        os.set_blocking(reader, False)
        child = self._children[request["id"]] = Child(request["id"], pid, os.pidfd_open(pid), reader)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._report(id=child.id, pid=pid)

    def _kill(self, id: int) -> None:
        if child := self._children.get(id):
            os.killpg(child.pid, signal.SIGKILL)

    def _pass_on(self, child: Child) -> bytes | None:
        """Reports the lines that are there. Returns what it read: None if nothing is there yet, nothing at the end."""
        try:
            chunk = os.read(child.output, CHUNK)
        except BlockingIOError:
            return None
        *lines, child.unfinished = (child.unfinished + chunk).split(b"\n")
        if not chunk and child.unfinished:
            lines, child.unfinished = [child.unfinished], b""
        for line in lines:
            self._report(id=child.id, line=line.decode(errors="replace"))
        return chunk

    def _reap(self, child: Child) -> None:
        os.killpg(
            child.pid, signal.SIGKILL
        )  # what it left behind; it is a zombie itself, so its number is still its own
        _, status = os.waitpid(child.pid, 0)
        while self._pass_on(child):
            pass
        for descriptor in (child.output, child.pidfd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        del self._children[child.id]
        self._report(id=child.id, status=os.waitstatus_to_exitcode(status))

    def _report(self, **fields: Any) -> None:
        self._reports.write(json.dumps(fields) + "\n")
        self._reports.flush()


def become_step(argv: Sequence[str], env: dict[str, str], output: int, parent: int) -> Never:
    """In a fork: runs a module as `python -m` would, and ends this process with its exit status."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        ctypes.CDLL(None).prctl(PR_SET_NAME, argv[0].encode(), 0, 0, 0)  # as `top` shows it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(env)
        status = run_module(argv)
    finally:
        os._exit(status)  # the parent's clean-up is not the child's to run


def run_module(argv: Sequence[str]) -> int:
    """Runs `argv[0]` as the main module with the other arguments; returns its exit status."""
    sys.argv = list(argv)
    status: str | int | None = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status if isinstance(status, int) else int(status is not None)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def strange_threads() -> list[str]:
    """Names of threads other than this one. A fork copies the locks they hold, but not the threads."""
    time.sleep(0.1)  # a new thread sets its name itself
    threads = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in threads]
    return [name for name in names if name not in HARMLESS]


def main(modules: Sequence[str]) -> None:
    """Imports `modules`, then serves."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints while imported must not look like a report
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for module in modules:
        importlib.import_module(module)
    if threads := strange_threads():
        sys.exit(f"error: importing {', '.join(modules)} started the threads {', '.join(threads)}: a fork might hang")
    gc.collect()
    gc.freeze()  # so that a child's garbage collection does not copy the parent's pages
    WarmParent(reports).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
