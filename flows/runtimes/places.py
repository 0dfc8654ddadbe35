"""Which Python runs a step on this machine: training and serving need packages that conflict with Prefect's."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from steps.common.errors import InvalidInputs

Place = Literal["flow", "train", "serve"]
PLACES: dict[str, Place] = {
    "fetch_smollm2": "train",
    "pretrain": "train",
    "initialize": "train",
    "sft": "train",
    "train": "train",
    "export": "train",
    "publish": "train",
    "serve": "serve",
}
"""Where a step is not at home in the flow's own environment."""


def place_of(step: str) -> Place:
    """The environment that a step runs in."""
    return PLACES.get(step, "flow")


def python_of(place: Place) -> Path:
    """The interpreter of an environment: where NIGHTSCHOOL_TRAIN_PYTHON or NIGHTSCHOOL_SERVE_PYTHON says, else where
    `make setup` puts it.

    Raises `InvalidInputs` where there is none.
    """
    if place == "flow":
        return Path(sys.executable)
    variable = f"NIGHTSCHOOL_{place.upper()}_PYTHON"
    python = Path(os.environ.get(variable) or Path(sys.prefix).parent / ".venvs" / place / "bin" / "python")
    if not python.is_file():
        raise InvalidInputs(f"there is no {place} environment at {python}: run `make setup`, or set {variable}")
    return python


def run_alone(step: str, root: Path, path: str, inputs: str = "{}") -> int:
    """Runs a step for itself, in its environment, its lines on the terminal; returns its exit status."""
    with TemporaryDirectory() as folder:
        asked = Path(folder) / "inputs.json"
        asked.write_text(inputs)
        return run_module(step, "--root", root, "--path", path, "--inputs", asked)


def run_module(step: str, *arguments: str | Path) -> int:
    """Runs `steps.<step>` in its environment, its lines on the terminal; returns its exit status."""
    return subprocess.run([python_of(place_of(step)), "-m", f"steps.{step}", *arguments]).returncode
