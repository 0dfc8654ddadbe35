"""The work of `steps.pretrain`: a tiny Qwen3 learns an environment's format from demonstrations."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from environments import Message, UnknownEnvironment
from steps.common.errors import InvalidInputs
from steps.common.progress import Progress
from steps.common.step import Workspace
from steps.grpo.model import prepare_torch
from steps.grpo.tokenizer import Encoder, train_tokenizer

if TYPE_CHECKING:
    from steps.pretrain import PretrainInputs, PretrainSettings

TOKENIZER_CONVERSATIONS = 1000
FINAL_RATE = 0.05
"""The learning rate at the end, as a share of the highest."""


def warm_start(inputs: "PretrainInputs", workspace: Workspace) -> dict[str, Any]:
    """Writes a base model that transformers and vLLM load. Raises `InvalidInputs` for an unknown environment."""
    prepare_torch()
    environment, settings = inputs.environment.load(), inputs.settings
    conversations = iter(environment.demonstrations(Random(inputs.seed)))
    try:
        first = list(islice(environment.demonstrations(Random(inputs.seed)), TOKENIZER_CONVERSATIONS))
    except UnknownEnvironment as error:  # it is here that a package turns out to be missing
        raise InvalidInputs(str(error)) from None
    tokenizer = train_tokenizer(first, settings.max_vocabulary, settings.context)
    torch.manual_seed(inputs.seed)
    model = Qwen3ForCausalLM(_config(settings, tokenizer))
    started = time.monotonic()
    loss, tokens = _train(model, tokenizer, conversations, settings)
    workspace.measured["tokens_per_second"] = tokens / (time.monotonic() - started)
    _save(model, tokenizer, workspace.out)
    return {"parameters": model.num_parameters(), "metrics": {"loss": loss, "tokens": float(tokens)}}


def _config(settings: "PretrainSettings", tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_size,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Iterator[list[Message]],
    settings: "PretrainSettings",
) -> tuple[float, int]:
    """Returns the last step's loss and the number of tokens seen."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    encode, progress, tokens = Encoder(tokenizer), Progress(settings.steps, "steps"), 0
    model.train()
    for step in range(1, settings.steps + 1):
        encoded = [encode(conversation) for conversation in islice(conversations, settings.batch_size)]
        loss = _loss(model, encoded, settings)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += sum(len(ids) for ids, _ in encoded)
        progress.show(step, loss=f"{loss.item():.3f}")
    return loss.item(), tokens


def _loss(
    model: Qwen3ForCausalLM, encoded: list[tuple[list[int], list[bool]]], settings: "PretrainSettings"
) -> torch.Tensor:
    """Weighted mean cross-entropy of the next token. Padding stands on the right, where a causal model never looks."""
    width = max(len(ids) for ids, _ in encoded)
    if width > settings.context:
        raise InvalidInputs(f"a demonstration has {width} tokens, more than pretrain's context of {settings.context}")
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
    spoken = torch.tensor([said + [False] * (width - len(said)) for _, said in encoded])
    present = torch.tensor([[True] * len(ids) + [False] * (width - len(ids)) for ids, _ in encoded])
    weights = torch.where(spoken, 1.0, settings.other_tokens_weight) * present
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def _rate(step: int, settings: "PretrainSettings") -> float:
    """Learning rate of a step (from 0), as a share of the highest."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 1 - (1 - FINAL_RATE) * done


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
