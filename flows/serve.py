"""`nightschool serve`: a checkpoint for the agents that work by day, in the foreground until someone stops it.

It takes no lock of the run and keeps its files apart, so that a night may train meanwhile. The server runs on this
machine whatever the run's runtime is, is probed as in training, and starts again at the same address where it dies.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from flows.config import RunConfig, recorded_config
from flows.run import Host
from flows.runtimes.base import Say, Service
from flows.runtimes.service import DAY, LocalService
from flows.serving import ModelServer, environment_of
from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs
from steps.common.runs import locked
from steps.serving.adapters import PolicyEndpoint
from steps.serving.command import HOST
from steps.serving.settings import ServeInputs
from steps.serving.supervisor import Stopped, stop_when_asked

LOOKS = 1.0
"""Seconds between two looks at the server."""


class Desk:
    """Serves one checkpoint at one address with one key, however often the server has to be started."""

    def __init__(self, root: Path, checkpoint: Checkpoint, host: str, port: int, key: str) -> None:
        self.root = root
        self.folder = f"{DAY}/{checkpoint.iteration:04d}"
        self._host, self._port, self._key = host, free_port(host, port), key

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        """Raises `InvalidInputs` and `ServerFault`."""
        return LocalService.start(
            self.root, inputs, say, self._host, port=self._port, key=self._key, folder=self.folder
        )

    def lend(self, checkpoint: Checkpoint) -> None:
        """The server is on this machine."""


def serve_by_day(root: Path, checkpoint: Checkpoint, host: str, port: int, say: Say) -> None:
    """Serves until SIGINT or SIGTERM comes.

    Raises `WrongWeights` where the server does not answer as the checkpoint, `ServerFault` where it does not come up or
    died too often, `InvalidInputs` where it can't work, and `RunInUse` where this checkpoint is served already.
    """
    given = given_key()
    desk = Desk(root, checkpoint, host, port, given or secrets.token_urlsafe(32))
    with locked(root / desk.folder), closing(ModelServer(desk, awake(recorded_config(root)))) as server:
        try:
            stop_when_asked(lifeline=False)
            announce(server.ensure(checkpoint, say), checkpoint, secret=given is not None, say=say)
            while True:
                time.sleep(LOOKS)
                server.ensure(checkpoint, say)
        except Stopped:
            say("stopped")


@contextmanager
def visiting(root: Path, checkpoint: Checkpoint) -> Iterator[Host]:
    """Serves a checkpoint to another run on this machine, once that asks for it.

    Raises `RunInUse` where this checkpoint is served already; the host raises as `ModelServer.ensure` does.
    """
    desk = Desk(root, checkpoint, HOST, 0, secrets.token_urlsafe(32))
    with locked(root / desk.folder), closing(ModelServer(desk, awake(recorded_config(root)))) as server:
        yield lambda say: environment_of(server.ensure(checkpoint, say))


def announce(policy: PolicyEndpoint, checkpoint: Checkpoint, secret: bool, say: Say) -> None:
    """What an agent needs."""
    say(f"checkpoint  {checkpoint.iteration}")
    say(f"base URL    {policy.base_url}")
    say(f"model       {policy.model}")
    say(f"key         {'as NIGHTSCHOOL_SERVE_KEY says' if secret else policy.api_key}")


def awake(config: RunConfig) -> RunConfig:
    """Settings of a server that never sleeps: one that can obeys anybody, without a key."""
    return config.model_copy(update={"serve": config.serve.model_copy(update={"while_training": "keep"})})


def given_key() -> str | None:
    """The key in the environment. Raises `InvalidInputs` where it fits into no HTTP header."""
    key = os.environ.get("NIGHTSCHOOL_SERVE_KEY") or None
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise InvalidInputs("NIGHTSCHOOL_SERVE_KEY holds characters that no HTTP header takes: use letters and digits")
    return key


def free_port(host: str, port: int) -> int:
    """`port`, or a free one where it is 0. Raises `InvalidInputs` where nobody can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInputs(f"can't listen on {host}:{port} ({error.strerror}): take another") from None
        return int(probe.getsockname()[1])
