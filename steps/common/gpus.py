"""Runs a step that was promised GPUs, once it sees them:  python -m steps.common.gpus all steps.train --root …

An engine that does not know a request for devices may ignore it (Podman's Docker API does), and a step that then trains
on the CPU looks healthy for days.
"""

import os
import sys
from pathlib import Path
from typing import Never

from steps.common.errors import InvalidInputs
from steps.common.step import exit_status_of


def require(wanted: str, devices: Path = Path("/dev")) -> None:
    """Raises `InvalidInputs` where fewer GPUs are here than `wanted`, a number or `all`, which is at least one."""
    seen = len(list(devices.glob("nvidia[0-9]*")))
    if seen < (1 if wanted == "all" else int(wanted)):
        raise InvalidInputs(
            f"runtime.gpus asks for {wanted} and {seen} are here: install NVIDIA's container toolkit, or change that"
        )


def main() -> Never:
    """Becomes the step's process."""
    wanted, *step = sys.argv[1:]
    if status := exit_status_of(lambda: require(wanted)):
        sys.exit(status)
    os.execv(sys.executable, [sys.executable, "-m", *step])


if __name__ == "__main__":
    main()
