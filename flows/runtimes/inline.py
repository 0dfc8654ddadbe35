"""Steps in this process, one at a time: for tests and debuggers. Times and memory are not bounded.

What a step needs must be installed here, so without torch in this environment a run gets as far as its first `train`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal

from flows.runtimes.base import Runtime, Say, Service
from flows.runtimes.service import LocalService
from steps.common.artifacts import Record
from steps.common.step import ArtifactT, InputsT, Step
from steps.serving.settings import ServeInputs


class InlineSettings(Record):
    """Steps run in the flow's own process."""

    type: Literal["inline"]


class InlineRuntime(Runtime):
    """`Step.run`, here."""

    def __init__(self, root: Path, settings: InlineSettings) -> None:
        super().__init__(root)
        self._one_at_a_time = Lock()

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
        with self._one_at_a_time, environment(env):
            return step.run(inputs, self.root, path)

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        return LocalService.start(self.root, inputs, say)

    def close(self) -> None:
        """Nothing is left to end: steps are over when `run` returns."""


@contextmanager
def environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
