"""How far a running step is, as Prefect shows it: a progress artifact of its task run, moved by the step's own lines.

Its key is that of the run and the kind of step, so that the page of artifacts does not grow with the iterations: each
task run adds a version of its own, whose description names iteration and shard.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.runtime import task_run

from flows.report import key_of
from flows.runtimes.base import Say
from steps.common.progress import share_done

LONG = frozenset({"pretrain", "sft", "rollout", "train", "evaluate", "evaluate_model"})
"""Steps that are worth watching; the others take less time than it costs to tell of them."""
EVERY = 3.0
"""Fewest seconds between two calls of Prefect's API."""


@contextmanager
def shown(run: str, step: str, say: Say) -> Iterator[Say]:
    """What to call with a step's lines: each goes on to `say`, and those that tell how far it is move the artifact.

    The artifact starts at 0 and is at 100 when the step has succeeded; one that failed stays where it was. Prefect's
    API may fail: then `say` is told once, and the step goes on.
    """
    if step not in LONG:
        yield say
        return
    artifact = Artifact(key_of(run, step.replace("_", "-")), f"{task_run.get_name()} of the run {run}", say)
    artifact.move(0.0)
    yield artifact.hear
    artifact.move(1.0)


class Artifact:
    """The progress artifact of this task run."""

    def __init__(self, key: str, description: str, say: Say) -> None:
        self._key, self._description, self._say = key, description, say
        self._id: UUID | None = None
        self._told = ""
        self._moved = 0.0
        self._given_up = False

    def hear(self, line: str) -> None:
        """Takes a line of the step."""
        self._say(line)
        if (share := share_done(line)) is not None:
            self._told = f": {line}"
            if time.monotonic() - self._moved >= EVERY:
                self.move(share)

    def move(self, share: float) -> None:
        """Has it show a share of the whole, and the line that told of it.

        Prefect itself waits a minute for a server that is restarted. After that no more is asked of it for this step,
        whose lines would be waiting.
        """
        if self._given_up:
            return
        self._moved = time.monotonic()
        try:
            self._send(round(100 * share, 1), self._description + self._told)
        except (httpx.HTTPError, PrefectException) as error:
            self._given_up = True
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"Prefect does not show the progress of this step any more: {reason}")

    def _send(self, percent: float, description: str) -> None:
        if self._id is None:
            # Prefect gives a coroutine in an event loop only, and a task is a thread without one.
            self._id = cast(UUID, create_progress_artifact(percent, self._key, description))
        else:
            update_progress_artifact(self._id, percent, description)
