"""What of an SFT that is under way survives a kill: the trainer's state, kept beside the step's folder now and then.

    .0000.<fingerprint>.sft/120/          adapter, optimizer, scheduler, chance, and how the steps so far went

A state is renamed into place, so it is whole or not there, and the one before it goes after that. Going on from it
gives the same bytes as never having stopped.
"""

import json
import shutil
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from steps.common import layout
from steps.common.step import Workspace
from steps.grpo.adapter import load_weights, save_adapter
from steps.grpo.imitation_trainer import ImitationTrainer, Seen

EVERY = 60.0
"""Seconds between two states: what a kill costs at most, beside the start."""
SEEN = "seen.json"


class Halfway(TrainerCallback):
    """Keeps the state of a trainer, and has it go on from what was kept."""

    def __init__(self, trainer: ImitationTrainer, workspace: Workspace, fingerprint: str) -> None:
        target = workspace.root / workspace.path
        self._folder = target.with_name(f".{target.name}.{fingerprint[:12]}{layout.HALFWAY}")
        self._trainer, self._kept = trainer, time.monotonic()

    def go_on(self) -> str | None:
        """Puts the newest state's weights and history into the trainer; returns where the rest is, None without one."""
        states = [path for path in self._folder.glob("*") if path.name.isdigit()]
        if not states:
            return None
        newest = max(states, key=lambda path: int(path.name))
        load_weights(self._trainer.model, newest)
        told = json.loads((newest / SEEN).read_text())
        self._trainer.seen = [Seen(batch, *facts) for batch, facts in zip(self._trainer.batches, told, strict=False)]
        print(f"goes on after {len(told)} of {len(self._trainer.batches)} steps", flush=True)
        return str(newest)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Keeps the state where it is time to."""
        if time.monotonic() - self._kept >= EVERY and self._trainer.accelerator.is_main_process:
            self._keep(state)
            self._kept = time.monotonic()
        return control

    def _keep(self, state: TrainerState) -> None:
        old = list(self._folder.glob("*"))
        out = self._folder / f".{state.global_step}{layout.PARTIAL}"
        out.mkdir(parents=True, exist_ok=True)
        save_adapter(self._trainer.model, "", out)
        self._trainer._save_optimizer_and_scheduler(str(out))
        self._trainer._save_rng_state(str(out))
        state.save_to_json(str(out / "trainer_state.json"))
        (out / SEEN).write_text(json.dumps([[seen.loss, seen.accuracy] for seen in self._trainer.seen]))
        out.rename(self._folder / str(state.global_step))
        for path in old:
            shutil.rmtree(path, ignore_errors=True)  # it may have been what a kill left of this very one
