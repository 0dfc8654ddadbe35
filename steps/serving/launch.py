"""`vllm …`, but on a CPU the engine is forked from the API server instead of importing everything once more.

That halves the time to start (8 CPU seconds less). Forking is vLLM's own default; only its CPU platform insists on
spawning, which it needs when it gives worker processes their OpenMP threads. Here the engine has no worker processes.
"""

import os
import sys
from typing import Any

from vllm.entrypoints.cli.main import main  # type: ignore[import-not-found]
from vllm.platforms import current_platform  # type: ignore[import-not-found]


def fork_the_engine() -> None:
    """Undoes the CPU platform's choice right after it is made."""
    platform = type(current_platform)
    check_and_update_config = platform.check_and_update_config

    def check_then_fork(config: Any) -> None:
        check_and_update_config(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check_then_fork)


if __name__ == "__main__":
    if current_platform.is_cpu():
        fork_the_engine()
    sys.exit(main())
