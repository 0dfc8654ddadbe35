"""The work of `steps.export`: the adapter as PEFT loads it, or merged and compared with the checkpoint's probe."""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steps.common.errors import InvalidInputs
from steps.common.models import PROBE, Probe, find_model
from steps.common.settings import Dtype
from steps.common.step import Workspace
from steps.grpo.adapter import CONFIG, WEIGHTS, add_adapter, load_weights, read_config
from steps.grpo.model import load_base, load_tokenizer, prepare_torch
from steps.grpo.probe import logprobs

if TYPE_CHECKING:
    from steps.export import ExportInputs

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest rms difference of a merged model, in nats. Merging rounds: bfloat16 keeps eight bits."""


def write_model(inputs: "ExportInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes model, tokenizer and card. Raises `InvalidInputs` where the merged model is not what the probe says."""
    prepare_torch()
    root, checkpoint = workspace.root, inputs.checkpoint
    load_tokenizer(root, checkpoint.base_model).save_pretrained(workspace.out)
    (workspace.out / "README.md").write_text(inputs.card)
    if inputs.merge:
        difference = _write_merged(root, root / checkpoint.path, checkpoint.base_model, workspace.out)
    else:
        difference = None
        _write_adapter(root / checkpoint.path, find_model(root, checkpoint.base_model), workspace.out)
    return {"merged": inputs.merge, "difference": difference}


def _write_adapter(folder: Path, base: str, out: Path) -> None:
    """The checkpoint's own, but that its config names a base model that PEFT finds: a hub id, or a folder here."""
    shutil.copyfile(folder / WEIGHTS, out / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": base}
    (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_merged(root: Path, folder: Path, base_model: str, out: Path) -> float:
    """In the base model's dtype of training; returns how far its answers are from the probe's."""
    probe = Probe.model_validate_json((folder / PROBE).read_text())
    model = add_adapter(load_base(root, base_model, probe.dtype), read_config(folder), seed=0)
    load_weights(model, folder)
    merged = model.merge_and_unload(safe_merge=True)
    answers = logprobs(merged, [sequence.token_ids for sequence in probe.sequences])
    differences = [
        answer - expected
        for sequence, row in zip(probe.sequences, answers, strict=True)
        for answer, expected in zip(row, sequence.logprobs, strict=True)
    ]
    difference = math.sqrt(sum(d * d for d in differences) / len(differences))
    if not difference <= TOLERANCE[probe.dtype]:
        raise InvalidInputs(
            f"merged into {find_model(root, base_model)}, checkpoint {folder.name} answers otherwise than it was "
            f"trained to (rms difference {difference:.2g} nats, allowed {TOLERANCE[probe.dtype]:g}): is that its base?"
        )
    merged.save_pretrained(out)
    return difference
