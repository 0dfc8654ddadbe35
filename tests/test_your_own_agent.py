"""docs/your-own-agent.md, followed: its files are written and its commands run as they stand, in their order.

Only the model is another one: it is tiny and knows nothing, and lies where the page's first command would put the real
one, which would take minutes. It is trained all the same, by real steps at a real vLLM.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from node_fixtures import EXAMPLE, node_modules

from steps.common.artifacts import BaseModelFiles
from steps.common.step import Inputs, Step, Workspace
from steps.fetch_smollm2 import FETCH_SMOLLM2, FetchSmollm2Inputs

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(900)]
__all__ = ["node_modules"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/your-own-agent.md"
BLOCK = re.compile(r"(?:`([\w.]+)`:\n\n```(?!sh)\w+|^```sh)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of the page: commands where it has no name, else a file."""

    name: str
    text: str


def sections() -> list[list[Block]]:
    """The blocks under each heading. Before a file its name ends the line, as in `name`:"""
    return [
        [Block(name, text) for name, text in BLOCK.findall(section)]
        for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    ]


def test_the_pages_files_are_those_of_the_example() -> None:
    files = {block.name: block.text for section in sections() for block in section if block.name}
    kept = subprocess.run(["git", "ls-files", "."], cwd=EXAMPLE, capture_output=True, text=True, check=True).stdout
    assert files == {name: (EXAMPLE / name).read_text() for name in kept.split()}
    assert len(re.findall("^```", PAGE.read_text(), flags=re.MULTILINE)) == 2 * sum(map(len, sections()))


class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "NIGHTSCHOOL_"))}
        self._env = kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def follow(self, section: list[Block]) -> str:
        """Returns what the commands said."""
        said = ""
        for block in section:
            if block.name:
                (self.folder / block.name).write_text(block.text)
            else:
                said += "".join(self.run(line) for line in block.text.splitlines())
        return said

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    def trained(self, run: str) -> bool:
        """Whether the run's last iteration had something to learn from, with no failed attempt."""
        status = json.loads(self.run(f"nightschool status {run} --json"))
        last = status["last_iteration"]
        assert (status["state"], last["failed"]) == ("finished", {}), status
        return last["kept"] > 0


@pytest.fixture(scope="module")
def reader(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"))

    def stand_in(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        shutil.copytree(tiny_run / "model", workspace.out, dirs_exist_ok=True)
        return {"parameters": 0, "metrics": {}}

    step = Step(FETCH_SMOLLM2.name, FetchSmollm2Inputs, BaseModelFiles, stand_in)
    step.run(FetchSmollm2Inputs(), reader.folder / "models", "smollm2-135m")
    yield reader
    reader.run("nightschool down")


def test_a_coroutine_is_trained(reader: Reader) -> None:
    said = reader.follow(sections()[0])
    assert "capitals is finished" in said and "What is the capital of Germany?" in said
    assert reader.trained("capitals")


def test_an_agent_of_the_agents_sdk_is_trained(reader: Reader) -> None:
    reader.follow(sections()[1])
    assert reader.trained("capitals-sdk")


def test_a_program_of_node_is_trained(reader: Reader, node_modules: Path) -> None:
    """Installed before, so that `npm install` has little to do, and is left out where there is no Node.js."""
    reader.follow(sections()[2])
    assert reader.trained("capitals-node")
