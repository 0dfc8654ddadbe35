"""Holds training in a container just before its checkpoint would count, while the run's folder has `held/train`."""

import os
import time
from pathlib import Path

rename = Path.rename


def rename_when_released(self: Path, target: "str | os.PathLike[str]") -> Path:
    target = Path(target)
    if target.parent.name == "checkpoints" and target.name != "0000":
        while (target.parent.parent / "held/train").exists():
            (target.parent / ".notes").mkdir(exist_ok=True)
            (target.parent / ".notes/train.waiting").touch()
            time.sleep(0.05)
    return rename(self, target)


Path.rename = rename_when_released  # type: ignore[method-assign]
