"""Backups and restores killed at any moment: nothing half-visible stays, and the same command ends them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from s3_fixtures import make, make_run, remote, tree

from steps.backup import backup
from steps.common.artifacts import verify
from steps.remote import bucket as bucket_module
from steps.remote import inventory
from steps.remote.compare import remote_damages
from steps.remote.settings import BucketSettings


class Commands:
    """Runs steps in processes that are forked from a warm parent, as Nightschool itself does: no time for imports."""

    def __init__(self) -> None:
        warm = ["boto3", "botocore.httpsession", "steps.remote.push", "steps.remote.fetch", "steps.remote.inventory"]
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "steps.common.warm", *warm], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._count = 0

    def run(self, *argv: str | Path, kill_after: float | None = None) -> tuple[int, str]:
        """Exit status (-9 where it was killed) and output."""
        self._count += 1
        self._say({"id": self._count, "argv": [*map(str, argv)], "env": dict(os.environ)})
        output = ""
        assert self._parent.stdout
        for line in self._parent.stdout:
            report = json.loads(line)
            if "pid" in report and kill_after is not None:
                time.sleep(kill_after)
                self._say({"id": self._count, "kill": True})
            output += report.get("line", "") + "\n"
            if "status" in report:
                return report["status"], output
        raise AssertionError("the warm parent is gone")

    def _say(self, message: dict[str, Any]) -> None:
        assert self._parent.stdin
        self._parent.stdin.write(json.dumps(message) + "\n")
        self._parent.stdin.flush()

    def close(self) -> None:
        assert self._parent.stdin and self._parent.stdout
        self._parent.stdin.close()
        self._parent.wait(10)
        self._parent.stdout.close()


@pytest.fixture
def commands() -> Iterator[Commands]:
    commands = Commands()
    yield commands
    commands.close()


KILLS = 30


def sized(root: Path, seed: int) -> Path:
    """A run with a file that travels in parts."""
    make_run(root, checkpoints=2, seed=seed)
    make(root, "checkpoints/0003", seed, **{"adapter.bin": bucket_module.PART + 5})
    return root


def seconds(commands: Commands, *argv: str | Path) -> float:
    """How long a command takes that nobody kills."""
    began = time.monotonic()
    status, output = commands.run(*argv)
    assert status == 0, output
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_backup_killed_at_any_moment_goes_on(
    tmp_path: Path, place: BucketSettings, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, killed, runs = Random(7), 0, 0
    usual = seconds(commands, "steps.backup", "--root", sized(tmp_path / "first/night", 0))
    while killed < KILLS:
        runs += 1
        settings = place.model_copy(update={"prefix": f"{place.prefix}/{runs}"})
        monkeypatch.setenv("BACKUP_PREFIX", settings.prefix)
        root = sized(tmp_path / f"{runs}/night", runs)
        status = -9
        while status == -9:
            moment = random.uniform(0, usual / 2) if killed < KILLS else None
            status, output = commands.run("steps.backup", "--root", root, kill_after=moment)
            killed += status == -9
            assert not any(artifact.lacking for artifact in remote(settings).artifacts())
        assert status == 0, output
        assert not any(damage for _, damage in remote_damages(remote(settings), deep=True))
        assert {*remote(settings).objects} == {*tree(root)}
        with monkeypatch.context() as patch:
            patch.setattr(inventory, "STALE", timedelta())
            left = remote(settings).uploads()
            assert {found.path for found in left} <= {"checkpoints/0003/adapter.bin"}
            assert remote(settings).clear_uploads() == left and not remote(settings).uploads()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restore_killed_at_any_moment_goes_on(tmp_path: Path, place: BucketSettings, commands: Commands) -> None:
    random, killed, runs = Random(8), 0, 0
    original = sized(tmp_path / "original/night", 0)
    backup(original, place)
    usual = seconds(commands, "steps.restore", "--root", tmp_path / "first/night")
    while killed < KILLS:
        runs += 1
        root, status = tmp_path / f"{runs}/night", -9
        while status == -9:
            moment = random.uniform(0, usual / 2) if killed < KILLS else None
            status, output = commands.run("steps.restore", "--root", root, kill_after=moment)
            killed += status == -9
            visible = tree(root) if root.exists() else {}
            assert visible.items() <= tree(original).items()
            assert all(verify((root / path).parent) for path in visible if path.endswith("manifest.json"))
            assert ("run.json" in visible) <= (len(visible) == len(tree(original)))
        assert status == 0, output
        assert tree(root) == tree(original) and not list(root.rglob("*.partial"))
