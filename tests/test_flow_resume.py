"""A run survives kills of its steps, of the flow and of the model server, wherever they are, and a move elsewhere.

One small run through the real command, with a real vLLM and a real Prefect server, is killed in each phase in turn and
started again. In the end nothing that was finished was done again, and nothing half-done is left.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_fixtures import TINY

from flows.config import RunConfig
from flows.plan import Plan
from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.status import damages, status_of
from steps.serving.endpoint import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(1200)]

HELD = Path(__file__).parent / "held"
GROUP_SIZE = 2
CONFIG = (
    f"""
name = "run"
iterations = 2
[environment]
name = "held:Held"
options = {{ test_tasks = 4 }}
[rollout]
groups = 4
group_size = {GROUP_SIZE}
groups_per_shard = 2
[evaluate]
tasks = 4
every = 1
"""
    + TINY
)


class Night:
    """One run, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.held = folder, folder / "runs", folder / "held"
        self.held.mkdir(parents=True)
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
        self.process: subprocess.Popen[bytes] | None = None
        self.finished: dict[str, bytes] = {}
        self.output = folder / "output"
        self.api: dict[str, str] = {}

    @property
    def root(self) -> Path:
        return self.runs / "run"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(HELD),
            "HELD": str(self.held),
            "NIGHTSCHOOL_RUNS": str(self.runs),
            **self.api,
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).parent / "nightschool"), *arguments]

    def start(self) -> None:
        """The same command, again."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command("train", str(self.config)), env=self.environment, stdout=output, stderr=output
            )

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = 180.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self.process is None or self.process.poll() is None, f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < end, f"no {what}:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        return "\n".join(self.output.read_text().splitlines()[-40:])

    def hold(self, step: str) -> None:
        (self.held / step).touch()

    def release(self, step: str) -> None:
        (self.held / step).unlink()
        (self.held / f"{step}.waiting").unlink(missing_ok=True)

    def hold_tasks(self, *tasks: str) -> None:
        (self.held / "tasks").write_text(" ".join(tasks))

    def wait_until_held(self, name: str) -> None:
        """Until it waits, and not only did before it was killed."""
        (self.held / f"{name}.waiting").unlink(missing_ok=True)
        self.wait_for((self.held / f"{name}.waiting").exists, f"{name} waiting")

    def kill_step(self, step: str) -> None:
        for pid in [pid for pid in self.processes() if comm(pid) == f"steps.{step}"]:
            os.kill(pid, signal.SIGKILL)

    def kill_flow(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = None
        self.wait_for(lambda: not self.processes(), "end of all processes", timeout=30)
        self.check_manifests()

    def finish(self) -> None:
        assert self.process
        status = self.process.wait(400)
        assert status == 0, self.said()
        self.process = None
        self.check_manifests()

    def processes(self) -> list[int]:
        """Everything that the command started and that still runs, but for Prefect's server."""
        mark = f"HELD={self.held}".encode()
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and mark in environ(path)]
        flow = self.process.pid if self.process else None
        return [pid for pid in found if pid != flow and b"prefect.server" not in read(Path(f"/proc/{pid}/cmdline"))]

    def check_manifests(self) -> None:
        """None of those that were there has changed since."""
        now = {
            manifest.parent.relative_to(self.root).as_posix(): manifest.read_bytes()
            for manifest in self.root.rglob(layout.MANIFEST)
            if not manifest.parent.name.startswith(".")
        }
        assert {path: now.get(path) for path in self.finished} == self.finished
        self.finished = now

    def played(self) -> Counter[str]:
        return Counter((self.held / "played").read_text().split())

    def stored_groups(self) -> list[Path]:
        return sorted((self.root / "iterations/0000/rollouts").glob(".*.groups/*.parquet"))


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    night = Night(tmp_path / "night")
    yield night
    if night.process:
        night.process.kill()
        night.process.wait()
    night.api, night.runs = {}, tmp_path / "night" / "runs"
    subprocess.run(night.command("down"), env=night.environment, check=True, timeout=60)


def test_kills_cost_nothing_that_was_finished(night: Night) -> None:
    tasks = [[task.id for task in shard] for shard in shards_of_first_iteration(night)]
    evaluated = "test-0"

    night.hold_tasks(evaluated)
    night.start()
    night.wait_until_held(evaluated)
    night.kill_step("evaluate")  # is tried again by the same flow
    night.wait_until_held(evaluated)
    night.kill_flow()

    first, second = tasks[0][1], tasks[1][1]
    night.hold_tasks(first, second)
    night.start()
    for task in (first, second):
        night.wait_until_held(task)
    night.wait_for(lambda: len(night.stored_groups()) == 2, "one finished group a shard")
    finished = {file: file.stat().st_mtime_ns for file in night.stored_groups()}
    night.kill_step("rollout")
    for task in (first, second):
        night.wait_until_held(task)
    kill_model_server(night)
    for task in (first, second):
        night.wait_until_held(task)
    assert {file: file.stat().st_mtime_ns for file in night.stored_groups()} == finished
    night.kill_flow()
    assert {file: file.stat().st_mtime_ns for file in night.stored_groups()} == finished
    night.hold_tasks()

    for step in ("group", "collate", "train"):
        night.hold(step)
        night.start()
        night.wait_until_held(step)
        night.kill_step(step)
        night.wait_until_held(step)
        night.kill_flow()
        if step == "collate":
            night.start()
            night.wait_until_held(step)
            night.kill_flow(signal.SIGINT)  # Ctrl-C is a kill like any other
        night.release(step)

    move(night)
    night.start()
    night.finish()

    played = night.played()
    assert {task: played[task] for shard in tasks for task in shard[:1]} == {shard[0]: GROUP_SIZE for shard in tasks}
    assert not night.processes()
    assert not [path for path in night.root.rglob(".*") if path.name != layout.LOCK]
    assert not [damage for _, damage in damages(night.root) if damage]
    assert status_of(night.root).state == "finished"
    assert (night.root / layout.checkpoint(2)).is_dir()

    night.start()  # nothing is left to do
    began = time.monotonic()
    night.finish()
    assert time.monotonic() - began < 60
    assert night.played() == played


def shards_of_first_iteration(night: Night) -> list[list]:
    """What the run will play, by the plan that it follows."""
    config = RunConfig.from_toml(night.config, ["environment.name=tic_tac_toe", "environment.options={test_tasks=4}"])
    nothing = Checkpoint(path="", digest="", iteration=0, base_model="", step=0, updated=False, metrics={})
    return [shard.tasks for shard in Plan(config).shards(nothing)]


def kill_model_server(night: Night) -> None:
    endpoint = Endpoint.read(night.root / "logs/serve/endpoint.json")
    assert endpoint
    os.killpg(endpoint.pid, signal.SIGKILL)


def move(night: Night) -> None:
    """The run's folder, to where it has never been. Prefect's server stays where it is."""
    from flows.server import ServerRecord

    server = ServerRecord.model_validate_json((night.runs / ".prefect/server.json").read_text())
    elsewhere = night.folder / "elsewhere"
    elsewhere.mkdir()
    night.root.rename(elsewhere / "run")
    night.runs, night.api = elsewhere, {"PREFECT_API_URL": server.api}


def comm(pid: int) -> str:
    return read(Path(f"/proc/{pid}/comm")).decode().strip()


def environ(process: Path) -> bytes:
    return read(process / "environ")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
