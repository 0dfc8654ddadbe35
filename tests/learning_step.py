"""A step in the place of `train`, which needs no torch: copied to where workers find it as `steps.learn`."""

import os
import signal
from pathlib import Path
from random import Random
from typing import Any

from steps.common.artifacts import Batch, Checkpoint, verify
from steps.common.step import Inputs, Step, Workspace


class LearnInputs(Inputs):
    checkpoint: Checkpoint
    batch: Batch
    rate: float = 1.0


def learn(inputs: LearnInputs, workspace: Workspace) -> dict[str, Any]:
    """Reads all that it is given, and may be killed once."""
    for path in ("model", inputs.checkpoint.path, inputs.batch.path):
        verify(workspace.root / path)
    print("learns from", inputs.batch.path, "with a key of", len(os.environ["NIGHTSCHOOL_POLICY_KEY"]), flush=True)
    if (mark := os.environ.get("LEARN_MARK")) and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (workspace.out / "adapter.bin").write_bytes(Random(f"{inputs.checkpoint.digest}{inputs.rate}").randbytes(5000))
    next_one = inputs.checkpoint.iteration + 1
    return {"iteration": next_one, "base_model": "model", "step": next_one, "updated": True, "metrics": {}}


LEARN = Step("learn", LearnInputs, Checkpoint, learn)

if __name__ == "__main__":
    LEARN.main()
