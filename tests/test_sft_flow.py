"""A run starts from demonstrations, is killed while it does, and goes on by reward; a fork starts from its best ones.

Through the real command, with a real vLLM, which has to prove that it serves what the examples taught.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
from run_fixtures import TINY

from steps.common import layout, tables
from steps.common.artifacts import Checkpoint, Demonstrations, read_artifact, read_manifest
from steps.common.status import damages, status_of
from steps.examples.best import SEQUENCES

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(900)]

HELD = Path(__file__).parent / "held"
CONFIG = (
    """
iterations = 2
[environment]
name = "held:Held"
options = { test_tasks = 4 }
[train]
beta = 0.1
[rollout]
groups = 3
group_size = 2
[evaluate]
tasks = 4
every = 2
"""
    + TINY
)


class Command:
    """`nightschool`, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "held").mkdir()
        self.runs, self.output = folder / "runs", folder / "output"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(HELD),
            "HELD": str(folder / "held"),  # marks its processes, too
            "NIGHTSCHOOL_RUNS": str(self.runs),
        }

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            command = [Path(sys.executable).parent / "nightschool", *arguments]
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    def run(self, *arguments: str) -> None:
        assert self.start(*arguments).wait(500) == 0, self.output.read_text()[-3000:]

    def wait_for(self, flow: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
        end = time.monotonic() + 200
        while not condition():
            assert flow.poll() is None and time.monotonic() < end, self.output.read_text()[-3000:]
            time.sleep(0.02)

    def at_work(self, step: str) -> list[int]:
        mark = f"HELD={self.environment['HELD']}".encode()
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and is_step(p, step, mark)]


def is_step(process: Path, step: str, mark: bytes) -> bool:
    try:
        named = (process / "comm").read_text().strip() == f"steps.{step}"
        return named and mark in (process / "environ").read_bytes()
    except OSError:  # it has ended
        return False


@pytest.fixture
def nightschool(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.run("down")


def test_a_run_learns_from_examples_and_a_fork_from_its_best(nightschool: Command, tmp_path: Path) -> None:
    config, again = tmp_path / "first.toml", tmp_path / "again.toml"
    config.write_text('name = "first"\n' + CONFIG + "[sft]\ndemonstrations = 64\nlearning_rate = 5e-3\n")
    flow = nightschool.start("train", str(config))
    nightschool.wait_for(flow, lambda: nightschool.at_work("sft"))
    for pid in nightschool.at_work("sft"):
        os.kill(pid, signal.SIGKILL)
    assert flow.wait(500) == 0, nightschool.output.read_text()[-3000:]
    assert "checkpoints/0000: was killed by SIGKILL" in nightschool.output.read_text()

    first = nightschool.runs / "first"
    status = status_of(first)
    assert (status.state, status.start and status.start.examples) == ("finished", 64)
    assert status.start and status.start.metrics["updates"] == 4
    assert not [damage for _, damage in damages(first) if damage]
    for i in range(3):
        checkpoint = read_artifact(Checkpoint, first, layout.checkpoint(i))
        assert (first / checkpoint.path / "reference/adapter_model.safetensors").exists()
        assert checkpoint.step <= i, "the optimizer starts with the iterations"
    second = read_artifact(Checkpoint, first, layout.checkpoint(1))
    assert second.updated and abs(second.metrics["kl"]) < 1e-6, "the KL is to checkpoint 0"

    nightschool.run("fork", "first", "--iteration", "2", "again")
    again.write_text('name = "again"\n' + CONFIG + '[sft]\nbest_of = "first"\nmin_reward = 0.2\n')
    flow = nightschool.start("train", str(again))
    fork = nightschool.runs / "again"
    nightschool.wait_for(flow, lambda: (fork / layout.checkpoint(0) / layout.MANIFEST).exists())
    flow.send_signal(signal.SIGINT)
    flow.wait(60)

    gathered = read_artifact(Demonstrations, fork, layout.DEMONSTRATIONS)
    best = pl.read_parquet(fork / gathered.path / SEQUENCES)
    played = tables.read(sorted(first.glob("iterations/*/rollouts/*/*.parquet")), tables.TRAJECTORY_COLUMNS)
    assert gathered.examples + gathered.dropped.get("below_min_reward", 0) == 6
    sampled = [sequence["token_ids"] for row in played["sequences"] for sequence in row]
    assert all(row in sampled for row in best["token_ids"].to_list()) and best["reward"].min() >= 0.2
    manifest = read_manifest(fork / layout.checkpoint(0))
    assert manifest and (manifest.step, manifest.artifact["step"]) == ("sft", 0)
    assert json.loads((fork / "origin/manifest.json").read_text())["artifact"]["sft"]["demonstrations"] == 64
