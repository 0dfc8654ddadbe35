"""The flow's end of a warm parent (`steps.common.warm`): starts it, asks it for processes, hears how they fare."""

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any

THREAD_LIMITS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Unless set otherwise. One thread a process: steps run side by side, and sums keep their order."""
CLOSING = 2.0
"""Seconds that killed children, and the parent at the end of its stdin, may take."""


class WarmParentDied(Exception):
    """The parent is gone, and all its children with it."""


class WarmParent:
    """One environment's warm parent. Thread-safe: many steps at a time."""

    def __init__(self, python: Path, modules: Sequence[str], log: Path) -> None:
        self._log = log
        self._lock = Lock()
        self._ids = itertools.count()
        self._listeners: dict[int, Queue[dict[str, Any]]] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "steps.common.warm", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=THREAD_LIMITS | os.environ,
                start_new_session=True,  # Ctrl-C is the flow's to handle
            )
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, argv: Sequence[str], env: Mapping[str, str], timeout: float, say: Callable[[str], None]) -> int:
        """Runs a module as a command and returns its exit status (negative: the signal that ended it).

        Raises `TimeoutError` after killing it, and `WarmParentDied`.
        """
        id, reports = next(self._ids), Queue[dict[str, Any]]()
        self._listeners[id] = reports
        self._ask({"id": id, "argv": list(argv), "env": dict(env)})
        try:
            return self._follow(reports, timeout, say)
        except Empty:
            self._ask({"id": id, "kill": True})
            with suppress(Empty):
                self._follow(reports, CLOSING, say)
            raise TimeoutError from None

    def _follow(self, reports: "Queue[dict[str, Any]]", timeout: float, say: Callable[[str], None]) -> int:
        """Passes lines on until the exit status comes. Raises `Empty` when the time is over."""
        end = time.monotonic() + timeout
        while True:
            report = reports.get(timeout=max(0.0, end - time.monotonic()))
            if "line" in report:
                say(report["line"])
            elif "status" in report:
                return int(report["status"])
            elif "died" in report:
                raise WarmParentDied(f"the parent of its process ended with status {report['died']} (log {self._log})")

    def close(self) -> None:
        """Ends it and its children; harmless where it is dead."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                self._tell_all_that_it_died()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as reports:
            for line in reports:
                report = json.loads(line)
                self._listeners[report["id"]].put(report)
                if "status" in report:
                    del self._listeners[report["id"]]
        self._tell_all_that_it_died()

    def _tell_all_that_it_died(self) -> None:
        status = self._process.wait()
        for reports in list(self._listeners.values()):
            reports.put({"died": status})
