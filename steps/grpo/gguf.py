"""Turns a model in a GGUF file, where llama.cpp keeps quantized ones, into a folder that transformers and vLLM load."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steps.grpo.model import prepare_torch


def convert(file: Path, folder: Path) -> int:
    """Writes bfloat16 weights, tokenizer and chat template to `folder`. Returns the number of parameters."""
    prepare_torch()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # transformers has turned the quantized weights into plain ones, but goes on to think of the model as quantized,
    # and would not save it.
    del model.config.quantization_config
    vars(model).update(hf_quantizer=None, is_quantized=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
