"""An agent that is a program, in any language: a process for each rollout, which posts its own reward.

    [environment]
    name = "program"
    options = { command = ["node", "agent.mjs"], file = "tasks.jsonl" }

The task comes as JSON on stdin: `{"id": …, "seed": …, "data": {…}}`. The model's address, key and name are in
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Before it ends, with status 0, the program posts what the attempt was
worth: `POST $OPENAI_BASE_URL/reward` with the same key, `{"reward": 1.0, "metrics": {…}, "metadata": {…}}`.
"""

import asyncio
import codecs
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from environments._tasks_file import read_tasks
from environments.base import Environment, Policy, Result, Split, Task

INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TZ", "TMPDIR")
LOGGED = 10_000
"""Characters of a program's output that go to the log."""
TAIL = 2_000
"""Characters of its end that are kept with a failure."""
CHUNK = 1 << 16
LAST_WORDS = 1.0
"""Seconds to wait for what a program has printed, where something that it left behind holds its output open."""
ERROR = re.compile(r"^(Uncaught )?[\w.]*(Error|Exception)\b")


class ProgramFailed(Exception):
    """The program could not be started, or ended badly."""


class NoResult(Exception):
    """The program ended well, but posted no reward."""


class ProgramEnvironment(Environment):
    """An agent that is a program, and its tasks."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program, found by PATH or by its path, and its arguments. It runs in the current folder."""
    file: Path
    """JSONL: a task a line, `{"id": …, "split": "train" | "test", …}`; what Task does not know goes to its `data`."""
    forwarded: tuple[str, ...] = ()
    """Names of environment variables that it gets, besides PATH, HOME and the like."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return read_tasks(self.file, split)

    async def rollout(self, task: Task, policy: Policy) -> Result:
        shown, output = shlex.join(self.command), Output(task.id)
        try:
            status = await run(self.command, task.model_dump_json(), self._variables(policy), output)
        except OSError as error:
            raise ProgramFailed(
                f"`{shown}` can't be started: {error.strerror} (PATH is {os.get_exec_path()})"
            ) from None
        if status:
            end = f"exit status {status}" if status > 0 else f"signal {-status} ({signal.strsignal(-status)})"
            raise noted(ProgramFailed(f"`{shown}` ended with {end}: {output.reason()}"), output)
        if policy.posted is None:
            wanted = 'POST {"reward": 1.0} to $OPENAI_BASE_URL/reward, with the key in OPENAI_API_KEY'
            raise noted(NoResult(f"`{shown}` ended without a reward: it must {wanted}"), output)
        return policy.posted

    def _variables(self, policy: Policy) -> dict[str, str]:
        kept = {name: os.environ[name] for name in (*INHERITED, *self.forwarded) if name in os.environ}
        return kept | {
            "OPENAI_BASE_URL": policy.base_url,
            "OPENAI_API_KEY": policy.api_key,
            "OPENAI_MODEL": policy.model,
        }


class Output:
    """What a program prints: its beginning goes to the log, line by line, and its end is kept."""

    def __init__(self, name: str) -> None:
        self.tail = ""
        self._name, self._left, self._line = name, LOGGED, ""

    def take(self, text: str) -> None:
        """Takes the next piece."""
        self.tail = (self.tail + text)[-TAIL:]
        if self._left < 0:
            return
        *lines, self._line = (self._line + text[: self._left]).split("\n")
        self._left -= len(text)
        for line in lines:
            self._say(line)
        if self._left < 0:
            self._say(f"{self._line} … (only {LOGGED} characters of what it prints are shown)")
            self._line = ""

    def end(self) -> None:
        """Says the last line, where it has not ended."""
        if self._line:
            self._say(self._line)

    def reason(self) -> str:
        """Its last line that names an error, else its last line."""
        lines = [line.strip() for line in self.tail.split("\n") if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]
        return (errors or lines or ["it printed nothing"])[-1]

    def _say(self, line: str) -> None:
        print(f"[{self._name}] {line}", flush=True)


def noted(error: Exception, output: Output) -> Exception:
    """The error, whose traceback will have the end of the output."""
    error.add_note(f"The end of what it printed:\n{output.tail or 'nothing'}")
    return error


async def run(command: Sequence[str], stdin: str, env: Mapping[str, str], output: Output) -> int:
    """Runs a program to its end; returns its exit status, negative where a signal ended it.

    What it started and left in its process group ends with it, also where this is cancelled. What has left that group,
    and all where this process is killed, is left to whoever keeps this one. Raises `OSError` where it can't be started.
    """
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    assert process.stdout
    with process.stdout as pipe:
        reading = asyncio.create_task(_read(pipe.fileno(), output))
        try:
            await _exit_of(process.pid)
        finally:
            # Before it is waited for: until then its number is its own, also that of its group.
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            await asyncio.wait({reading}, timeout=LAST_WORDS)
            reading.cancel()
            await asyncio.wait({reading})
            output.end()
    return status


async def _exit_of(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        await _readable(descriptor)
    finally:
        os.close(descriptor)


async def _read(descriptor: int, output: Output) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    os.set_blocking(descriptor, False)
    while True:
        await _readable(descriptor)
        with suppress(BlockingIOError):
            if not (chunk := os.read(descriptor, CHUNK)):
                return
            output.take(decoder.decode(chunk))


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
