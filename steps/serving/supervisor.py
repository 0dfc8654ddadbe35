"""Runs vLLM as a group of processes that ends when this process ends, however that happens.

vLLM is more than one process, and its engine survives a kill of its API server. So the group is watched from inside: a
shell that waits for the end of a pipe, which we hold open, and then kills its own process group. When we stop in an
orderly way we do the same ourselves.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from steps.common.errors import ServerFault
from steps.serving.command import HOST, Command
from steps.serving.endpoint import Client, Endpoint

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL: with a request under way vLLM does not end by itself."""
POLL = 0.2
WITH_GUARD = """\
exec 3<&0 </dev/null
(trap '' TERM INT; read -r _ <&3; kill -KILL 0) &
exec 3<&-
exec "$@"
"""


class Stopped(Exception):
    """Someone asked us to stop."""


def stop_when_asked(lifeline: bool) -> None:
    """From now on SIGTERM, SIGINT and, with `lifeline`, the end of standard input raise `Stopped` in this thread."""
    signal.signal(signal.SIGTERM, _raise_stopped)
    signal.signal(signal.SIGINT, _raise_stopped)
    if lifeline:
        threading.Thread(target=_stop_at_end_of_stdin, daemon=True).start()


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise Stopped


def _ignore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop_at_end_of_stdin() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """`port`, or else a free one, that the system gives to nobody else meanwhile.

    A socket that is bound and never listens keeps it. vLLM may bind it too, since both say SO_REUSEADDR.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((HOST, port))
        yield reservation.getsockname()[1]


@contextmanager
def running(command: Command, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The command as leader of a process group, its output appended to `log`; at the end the whole group is gone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", WITH_GUARD, "vllm", *command.arguments],
            env=command.environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _ignore_signals()
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


def wait_until_ready(endpoint: Endpoint, alive: Callable[[], bool]) -> None:
    """Returns once this very server answers, a request with log-probabilities included.

    Another server on the same port does not know the name, which is new with every start. Raises `ServerFault` after
    `startup_timeout`; returns early where the process is not `alive`, which the caller sees for itself.
    """
    patience = endpoint.inputs.settings.startup_timeout
    deadline = time.monotonic() + patience
    with Client(endpoint) as client:
        while alive():
            if _answers(client, endpoint.model):
                # The first request is slow; better here than in a rollout.
                client.complete(model=endpoint.model, prompt=[0], max_tokens=2, logprobs=0)
                return
            if time.monotonic() > deadline:
                raise ServerFault(f"vLLM did not answer within {patience:g} s")
            time.sleep(POLL)


def _answers(client: Client, name: str) -> bool:
    try:
        return name in client.models()
    except ServerFault:
        return False


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
