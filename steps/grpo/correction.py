"""Importance correction: how much the sampler's policy differs from the trainer's model that starts the iteration.

Server and trainer compute with other kernels, and the server's weights may be older. Truncated or masked importance
sampling weights the loss by the ratio of the two, as TRL does for its own vLLM engine.
"""

import math

import torch
from trl import GRPOConfig

from steps.grpo.batch import Tensors


def correction(args: GRPOConfig, start: torch.Tensor, micro_batch: Tensors) -> torch.Tensor:
    """exp(start - sampler) per token (rows, tokens) or of the sum over a row's sampled tokens (rows, 1), bounded.

    `*_truncate` clamps it into [clip_min, clip_max], `*_mask` makes it 0 outside. Per token it is 1 before that where
    nothing was sampled.
    """
    mode = args.vllm_importance_sampling_mode
    sampled = micro_batch["tool_mask"].to(start.device)
    difference = (start - micro_batch["sampling_per_token_logps"].to(start.device)) * sampled
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    low = -math.inf if args.vllm_importance_sampling_clip_min is None else args.vllm_importance_sampling_clip_min
    high = math.inf if args.vllm_importance_sampling_clip_max is None else args.vllm_importance_sampling_clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
