"""The work of `steps.initialize`: a base model gets its first adapter."""

from typing import TYPE_CHECKING, Any

from steps.common.step import Workspace
from steps.grpo.adapter import add_adapter, lora_config, save_adapter
from steps.grpo.model import load_base, load_tokenizer, prepare_torch
from steps.grpo.probe import logprobs, random_sequences, write_probe

if TYPE_CHECKING:
    from steps.initialize import InitializeInputs


def start(inputs: "InitializeInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes an adapter that changes nothing yet, and a probe of random tokens."""
    prepare_torch()
    base = load_base(workspace.root, inputs.base_model, inputs.dtype)
    vocabulary = len(load_tokenizer(workspace.root, inputs.base_model))
    sequences = random_sequences(vocabulary, inputs.seed)
    answers = logprobs(base, sequences)
    model = add_adapter(base, lora_config(inputs.lora), inputs.seed)
    save_adapter(model, inputs.base_model, workspace.out)
    write_probe(workspace.out, inputs.dtype, sequences, logprobs(model, sequences), None, answers)
    facts = {"iteration": 0, "step": 0, "updated": False, "metrics": {}}
    return {"base_model": inputs.base_model, "base_digest": inputs.base_digest, **facts}
