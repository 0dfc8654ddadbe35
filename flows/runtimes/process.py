"""Each step in a fresh process, in its own environment: the default on a machine without a container engine.

Processes are forked from one warm parent an environment (`steps.common.warm`), which has imported the heavy libraries
already. A parent that dies takes its children along; the next step gets another one.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Literal

from pydantic import Field

from flows.runtimes.base import Runtime, Say, Service, StepLog
from flows.runtimes.places import Place, place_of, python_of
from flows.runtimes.service import LocalService
from flows.runtimes.warm import WarmParent, WarmParentDied
from steps.common import layout
from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs, StepFailed
from steps.common.step import ArtifactT, InputsT, Step
from steps.serving.settings import ServeInputs

IMPORTED: dict[Place, Sequence[str]] = {
    "flow": ("duckdb", "openai", "steps.agent.session", "steps.common.step", "steps.common.tables"),
    "train": ("steps.grpo", "steps.common.step"),
}
"""What a warm parent imports: what takes long and starts no threads that a fork would miss."""


class ProcessSettings(Record):
    """A process a step, on this machine."""

    type: Literal["process"] = "process"
    parallel: int = Field(default=os.cpu_count() or 1, ge=1)
    """Most steps at a time, for shards of rollouts."""


class ProcessRuntime(Runtime):
    """Forks steps from warm parents."""

    def __init__(self, root: Path, settings: ProcessSettings) -> None:
        super().__init__(root)
        self._slots = BoundedSemaphore(settings.parallel)
        self._lock = Lock()
        self._parents: dict[Place, WarmParent] = {}
        self._closed = False

    def run(
        self,
        step: Step[InputsT, ArtifactT],
        inputs: InputsT,
        path: str,
        *,
        env: Mapping[str, str],
        timeout: float,
        say: Say,
    ) -> ArtifactT:
        log = StepLog(self.root, step.name, path, say)
        asked = log.keep(inputs)
        for place in IMPORTED:  # all of them: they import while the first one works
            self._parent(place)
        argv = [module_of(step), "--root", str(self.root), "--path", path, "--inputs", str(asked)]
        with self._slots:
            self._attempt(place_of(step.name), argv, path, env, timeout, log)
        return log.artifact_of(step, inputs, path)

    def _attempt(
        self, place: Place, argv: Sequence[str], path: str, env: Mapping[str, str], timeout: float, log: StepLog
    ) -> None:
        try:
            status = self._parent(place).run(argv, env, timeout, log.write)
        except TimeoutError:
            raise log.failure(path, -signal.SIGKILL, f"was stopped after {timeout:.0f} s, its time limit") from None
        except WarmParentDied as error:
            raise StepFailed(f"{path}: {error}") from None
        if status:
            raise log.failure(path, status, killed_by(-status) if status < 0 else "")

    def _parent(self, place: Place) -> WarmParent:
        with self._lock:
            self._check_open()
            parent = self._parents.get(place)
            if parent and not parent.alive():
                parent.close()
                parent = None
            if parent is None:
                log = self.root / layout.LOGS / "warm" / f"{place}.log"
                parent = self._parents[place] = WarmParent(python_of(place), IMPORTED[place], log)
            return parent

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        self._check_open()
        return LocalService.start(self.root, inputs, say)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for parent in self._parents.values():
                parent.close()

    def _check_open(self) -> None:
        """So that a task which is tried again after the flow was interrupted starts nothing."""
        if self._closed:
            raise InvalidInputs("the flow has ended: nothing is started any more")


def module_of(step: Step[InputsT, ArtifactT]) -> str:
    """Steps are modules: `python -m` runs them."""
    return f"steps.{step.name}"


def killed_by(number: int) -> str:
    """What a fatal signal tells."""
    guess = ": perhaps the machine ran out of memory" if number == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(number).name}{guess}"
