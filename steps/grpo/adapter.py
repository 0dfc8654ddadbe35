"""The LoRA adapter: made, read and written in PEFT's format, byte for byte the same for the same weights.

PEFT's own writer puts the base model's absolute folder, and sets in hash order, into `adapter_config.json`; here the
base is named as the run names it, so that a run can be moved, and lists are sorted.

A run that starts from examples keeps the adapter that it then had beside that of each checkpoint, as `reference`: it is
what the KL compares with. Without it that is the base model. Only the trainer reads it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.settings import LoraSettings

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
REFERENCE = "reference"
"""The reference's folder in a checkpoint's, and its name among the model's adapters."""
POLICY = "default"
"""The name of the adapter that is trained, as PEFT has it."""


def lora_config(settings: LoraSettings) -> LoraConfig:
    """PEFT's config. No dropout: the policy that is trained is the one that was sampled."""
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=sorted(settings.target_modules),
        task_type="CAUSAL_LM",
    )


def add_adapter(base: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Wraps the base with a new adapter: A random by `seed`, B zero. Raises `InvalidInputs` where it does not fit."""
    if "lm_head" in (config.target_modules or ()):
        raise InvalidInputs("lora.target_modules names lm_head, which the trainer's loss does not support: remove it")
    torch.manual_seed(seed)
    try:
        return get_peft_model(base, config)
    except ValueError as error:
        raise InvalidInputs(f"lora.target_modules does not fit the base model: {error}") from None


def read_config(folder: Path) -> LoraConfig:
    """Reads `adapter_config.json`. Raises `CorruptArtifact`."""
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise CorruptArtifact(f"{folder / CONFIG} can't be read ({error}); restore {folder} from a backup") from None
    config.inference_mode = False
    config.base_model_name_or_path = None
    return config


def load_weights(model: PeftModel, folder: Path, name: str = POLICY) -> None:
    """Puts the stored weights into one of the model's adapters. Raises `CorruptArtifact`."""
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CorruptArtifact(f"{folder / WEIGHTS} can't be read ({error}); restore {folder} from a backup") from None
    result: Any = set_peft_model_state_dict(model, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if "lora_" in key and f".{name}." in key]
    if missing or result.unexpected_keys:
        wrong = [*missing, *result.unexpected_keys][0]
        raise CorruptArtifact(f"{folder / WEIGHTS} does not fit its adapter_config.json and base model: {wrong}")


def add_reference(model: PeftModel, folder: Path) -> None:
    """Adds the reference of the checkpoint in `folder`, where it has one, frozen. Raises `CorruptArtifact`."""
    if (folder / REFERENCE).is_dir():
        model.add_adapter(REFERENCE, read_config(folder / REFERENCE))
        load_weights(model, folder / REFERENCE, REFERENCE)
        model.set_requires_grad(REFERENCE, False)


def save_adapter(model: PeftModel, base_model: str, folder: Path) -> None:
    """Writes config and weights into `folder`, which may have to be made; `base_model` is what the config names."""
    folder.mkdir(exist_ok=True)
    weights = {key: value.detach().cpu().contiguous() for key, value in get_peft_model_state_dict(model).items()}
    (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
    config = model.peft_config[POLICY]
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    fields |= {"base_model_name_or_path": base_model, "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
