"""docs/disaster-recovery.md, run: each of its commands, in its order, on a run with a real vLLM and a real S3 server.

What comes out is compared with a run that was never broken: the checkpoints are the same, bit for bit.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixtures import TINY
from s3_fixtures import Weed, environment

from flows.server import ServerRecord
from steps.common import layout
from steps.common.artifacts import read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(1200)]

GRADED = Path(__file__).parent / "graded"
DOC = Path(__file__).parent.parent / "docs/disaster-recovery.md"
CONFIG = (
    """
name = "demo"
iterations = {iterations}
[environment]
name = "graded:Graded"
[rollout]
groups = 2
group_size = 2
max_failed_fraction = 1.0
[group]
drop_zero_variance = false
[evaluate]
tasks = 8
every = 1
max_failed_fraction = 1.0
"""
    + TINY
)


class Machine:
    """A folder with the command, the settings and the runs, as in a clone of the project."""

    def __init__(self, folder: Path, s3: dict[str, str]) -> None:
        self.folder, self.runs = folder, folder / "runs"
        (folder / "configs").mkdir(parents=True)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "NIGHTSCHOOL_"))}
        self.env = (
            kept
            | s3
            | {
                "NIGHTSCHOOL_RUNS": str(self.runs),
                "PYTHONPATH": str(GRADED),
                "GRADE": str(folder / "grade"),
            }
        )

    @property
    def root(self) -> Path:
        return self.runs / "demo"

    def ask_for(self, iterations: int) -> None:
        (self.folder / "configs/demo.toml").write_text(CONFIG.format(iterations=iterations))

    def run(self, *commands: str, status: int = 0) -> str:
        """Runs commands in a shell, each of which must end well; returns what they said."""
        said = ""
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=400
            )
            said += done.stdout + done.stderr
            assert done.returncode == status, f"{command}\n{said[-3000:]}"
        return said

    def down(self) -> None:
        self.run(".venv/bin/nightschool down")

    def prefect(self) -> dict[str, str]:
        """Where its server is."""
        record = ServerRecord.read(self.runs / ".prefect/server.json")
        assert record
        return {"PREFECT_API_URL": record.api}

    def kill_when(self, path: str) -> None:
        """Trains, and kills everything as soon as there is `path`."""
        process = subprocess.Popen(
            ["bash", "-c", "exec .venv/bin/nightschool train configs/demo.toml"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 300
        while read_manifest(self.root / path) is None:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def checkpoints(self) -> dict[int, str]:
        """Digests, by iteration."""
        found = {i: read_manifest(self.root / layout.checkpoint(i)) for i in layout.numbered(self.root, "checkpoints")}
        return {i: manifest.digest for i, manifest in found.items() if manifest}

    def status(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.run(".venv/bin/nightschool status demo --json"))
        return found


def commands() -> dict[str, list[str]]:
    """What the page tells to run, by the number of the situation."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", DOC.read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```sh\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        found[section[0]] = [line.partition("   #")[0].strip() for block in blocks for line in block.splitlines()]
    return found


@pytest.fixture
def s3(weed: Weed) -> dict[str, str]:
    """What the page's first block sets."""
    return environment(weed.url, "disasters")


@pytest.fixture
def machine(tmp_path: Path, s3: dict[str, str]) -> Iterator[Machine]:
    """The machine that trains, from now on."""
    machine = Machine(tmp_path / "old", s3)
    yield machine
    machine.down()


def test_the_page_names_every_variable_that_it_takes(s3: dict[str, str]) -> None:
    first = DOC.read_text().partition("## 1.")[0]
    ours = {name for name in s3 if name.startswith(("BACKUP_B", "BACKUP_PREFIX", "AWS_")) and "METADATA" not in name}
    assert {name for name in ours if name in first} == ours


def test_each_situation_ends_as_the_page_says(machine: Machine, tmp_path: Path, s3: dict[str, str], weed: Weed) -> None:
    page = commands()
    assert list(page) == ["1", "2", "3", "4", "5"]

    # 1. Killed as soon as the first update is there.
    machine.ask_for(2)
    machine.kill_when(layout.checkpoint(1))
    machine.run(*page["1"])
    assert machine.status()["state"] == "finished"

    # 2. The disk is lost; then two more iterations.
    backed_up = machine.checkpoints()
    machine.down()
    shutil.rmtree(machine.runs)
    machine.ask_for(3)
    said = machine.run(*page["2"])
    assert "demo" in said and "would bring" in said
    assert machine.checkpoints().items() >= backed_up.items()
    assert machine.checkpoints() == never_broken(tmp_path / "unbroken", 3, machine.prefect())

    # 3. The bucket goes away for an iteration, and comes back.
    weed.kill()
    machine.ask_for(4)
    (machine.folder / "grade").write_text("1.0")
    machine.env |= {"AWS_MAX_ATTEMPTS": "1"}
    machine.run(".venv/bin/nightschool train configs/demo.toml")
    assert machine.status()["backup"]["failures"] > 0  # type: ignore[index]
    weed.start()
    machine.run(*page["3"])
    assert machine.status()["backup"]["failures"] == 0  # type: ignore[index]

    # 4. The newest is made champion, and is not to be; another run starts from an earlier one.
    machine.run(".venv/bin/nightschool promote demo")
    assert machine.status()["champion"] == 4
    before = machine.checkpoints()
    machine.run(*page["4"])
    assert machine.status()["champion"] == 0
    assert machine.checkpoints() == before
    again = Path(machine.runs / "demo-again")
    assert read_manifest(again / layout.checkpoint(1)) and not read_manifest(again / layout.checkpoint(2))

    # 5. Elsewhere, with nothing but the bucket.
    machine.down()
    other = Machine(tmp_path / "new", s3)
    other.ask_for(5)
    try:
        other.run(*page["5"])
        assert other.checkpoints().items() > before.items()
    finally:
        other.down()


def never_broken(folder: Path, iterations: int, prefect: dict[str, str]) -> dict[int, str]:
    """The checkpoints of the same run, made in one go without a bucket."""
    machine = Machine(folder, prefect)
    machine.ask_for(iterations)
    machine.run(".venv/bin/nightschool train configs/demo.toml")
    return machine.checkpoints()
