"""GRPO from stored records, and SFT before it, with torch, TRL and PEFT.

Importing this package imports all that its steps need, so that a warm process may do it once and fork for every step:
no device is touched, and no thread started but those of Polars' and Arrow's memory allocators, which outlive a fork.
Steps import it inside their work.
"""

import os

# Read by libraries when they are imported: TRL reports its use otherwise, and tokenizers warns of every fork.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from steps.grpo.imitation import imitate
from steps.grpo.start import start
from steps.grpo.update import update
from steps.grpo.warm_start import warm_start

__all__ = ["imitate", "start", "update", "warm_start"]
