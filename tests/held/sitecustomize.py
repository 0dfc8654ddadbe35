"""Holds steps at chosen points, so that a test can kill them there. Every Python that has this on its path imports it.

HELD names a folder. While `HELD/<step>` exists, a step of that name waits just before its finished folder would be
renamed into place: everything is written, nothing counts. That it waits, it says in `HELD/<step>.waiting`.
"""

import os
import time
from pathlib import Path

HELD = Path(os.environ["HELD"]) if "HELD" in os.environ else None
STEPS = {"groups": "group", "batch": "collate", "checkpoints": "train"}
rename = Path.rename


def rename_when_released(self: Path, target: "str | os.PathLike[str]") -> Path:
    target = Path(target)
    step = STEPS.get(target.name) or STEPS.get(target.parent.name)
    if HELD and step and self.name.endswith(".partial") and target.name != "0000":
        while (HELD / step).exists():
            (HELD / f"{step}.waiting").touch()
            time.sleep(0.02)
    return rename(self, target)


Path.rename = rename_when_released  # type: ignore[method-assign]
