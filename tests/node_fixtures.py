"""The packages of the example for Node.js, installed once a session."""

import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/capitals"


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`node_modules` with what the example's package.json names."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("there is no Node.js with npm on this machine; .ci/run installs them")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(EXAMPLE / "package.json", folder)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=240)
    return folder / "node_modules"
