"""The contract of a runtime: where a step runs, and where a model is served.

A runtime runs `python -m steps.<name>` somewhere that sees the run's folder, and returns the artifact it left there.
A step's own lines go to its log file and to `say`, as they come. What a runtime promises of failures:

    exit status 202        InvalidInputs with the step's own line: trying again won't help
    any other, or killed   StepFailed with the step's last line, the log's place, and a guess where one is good
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.errors import DO_NOT_RETRY, InvalidInputs, NightschoolError, StepFailed
from steps.common.step import ArtifactT, Inputs, InputsT, Step
from steps.common.storage import write_atomically
from steps.serving.settings import ServeInputs

ERROR = "error: "
"""How a step's own line starts, where it knows what was wrong."""
Say = Callable[[str], None]
"""Where a step's lines go: one call a line."""


class Service(Protocol):
    """A model server that was started, and is stopped by whoever started it."""

    endpoint: Path
    """The file that says where it listens and with which key; only its owner may read it."""

    def alive(self) -> bool: ...

    def stop(self) -> None:
        """Ends it, and waits for that; returns at once where it has ended already."""


class Runtime(ABC):
    """Where steps run, for one run. Whoever makes it closes it."""

    at_work: frozenset[str] = frozenset()
    """Artifacts that steps of an earlier flow, which was killed, are still making."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
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
        """Makes the artifact at `path`, with `env` added to the step's environment, within `timeout` seconds.

        Raises `InvalidInputs` and `StepFailed`.
        """

    @abstractmethod
    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        """Starts a model server and returns it when it is ready. Raises `InvalidInputs` and `ServerFault`."""

    def lend(self, checkpoint: Checkpoint) -> None:  # noqa: B027 (most runtimes have nothing to do)
        """Has the checkpoint's files where the server that was started last finds them. Raises `ServerFault`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the steps that run; nothing can be started any more."""


def reason_in(lines: Iterable[str]) -> str:
    """Why a process failed, from its last lines: its own error line, else the last that says something."""
    said = [line for line in lines if line.strip()]
    errors = [line.removeprefix(ERROR) for line in said if line.startswith(ERROR)]
    return (errors or said or ["it said nothing"])[-1]


class StepLog:
    """One attempt's lines: appended to the log file, handed to `say`, the last ones kept for the error message."""

    KEPT = 20

    def __init__(self, root: Path, step: str, path: str, say: Say) -> None:
        self.file = root / layout.log(step, path)
        self.last: deque[str] = deque(maxlen=self.KEPT)
        self._root, self._say = root, say
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, line: str) -> None:
        """Takes one line. A full disk loses it in the file only: `say` and the error message still have it."""
        self.last.append(line)
        self._say(line)
        try:
            with self.file.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            self._say(f"can't write to {self.file}: {error.strerror}")

    def keep(self, inputs: Inputs) -> Path:
        """Writes the attempt's inputs beside its log, where the step reads them."""
        file = self.file.with_suffix(".json")
        write_atomically(file, inputs.model_dump_json(indent=1).encode())
        return file

    def artifact_of(self, step: Step[InputsT, ArtifactT], inputs: InputsT, path: str) -> ArtifactT:
        """What a step that ended well has left. Raises `StepFailed` where that is nothing."""
        if artifact := step.finished(inputs, self._root, path):
            return artifact
        raise StepFailed(f"{path}: the step ended well and left no artifact (log {self.file})")

    def failure(self, path: str, status: int, hint: str = "") -> NightschoolError:
        """The error for an attempt that ended with `status`; negative: by that signal."""
        line = reason_in(self.last)
        if status == DO_NOT_RETRY:
            return InvalidInputs(line)
        return StepFailed(f"{path}: {hint or line} (exit status {status}, log {self.file})")
