"""The work of `steps.initialize`: a base model gets its first adapter, a new one or that of a fork."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import PreTrainedModel

from steps.common import layout
from steps.common.models import PROBE, Probe
from steps.common.step import Workspace
from steps.grpo.adapter import add_adapter, load_weights, lora_config, read_config, save_adapter
from steps.grpo.model import load_base, load_tokenizer, prepare_torch
from steps.grpo.probe import logprobs, random_sequences, write_probe

if TYPE_CHECKING:
    from steps.initialize import InitializeInputs


def start(inputs: "InitializeInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes the adapter, a probe, and in a fork what the optimizer needs to go on."""
    prepare_torch()
    base = load_base(workspace.root, inputs.base_model, inputs.dtype)
    sequences = _sequences(inputs, workspace)
    answers = logprobs(base, sequences)
    model = first_policy(base, inputs, workspace.root)
    if inputs.origin:
        folder = workspace.root / inputs.origin.path
        shutil.copytree(folder, workspace.out, ignore=shutil.ignore_patterns(layout.MANIFEST), dirs_exist_ok=True)
    else:
        save_adapter(model, inputs.base_model, workspace.out)
    write_probe(workspace.out, inputs.dtype, sequences, logprobs(model, sequences), None, answers)
    return {
        "iteration": 0,
        "base_model": inputs.base_model,
        "base_digest": inputs.base_digest,
        "step": inputs.origin.checkpoint.step if inputs.origin and inputs.origin.with_optimizer else 0,
        "updated": False,
        "metrics": {},
    }


def first_policy(base: PreTrainedModel, inputs: "InitializeInputs", root: Path) -> PeftModel:
    """The base model with an adapter that changes nothing yet, or with the origin's in a fork."""
    if inputs.origin is None:
        return add_adapter(base, lora_config(inputs.lora), inputs.seed)
    model = add_adapter(base, read_config(root / inputs.origin.path), inputs.seed)
    load_weights(model, root / inputs.origin.path)
    return model


def _sequences(inputs: "InitializeInputs", workspace: Workspace) -> list[list[int]]:
    """What the probe asks: of a fork what told its origin from other weights, else random tokens."""
    if inputs.origin:
        probe = Probe.model_validate_json((workspace.root / inputs.origin.path / PROBE).read_text())
        return [sequence.token_ids for sequence in probe.sequences]
    return random_sequences(len(load_tokenizer(workspace.root, inputs.base_model)), inputs.seed)
