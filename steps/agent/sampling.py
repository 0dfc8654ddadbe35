"""What of an agent's request reaches the server, and what the run decides instead.

Training divides by the probability with which a token was sampled, so the policy's own distribution, at the run's
temperature, is the only one that may be sampled from: whatever bends it is left out, with a warning.
"""

import sys
from collections import Counter
from typing import Any

from steps.common.settings import SamplingSettings

PASSES = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "n",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "mm_processor_kwargs",
        "top_logprobs",
    }
)
"""Sent on as they are: what the model reads, and where it stops."""
DECIDED = frozenset(
    {
        "model",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        "user",
        "metadata",
        "store",
    }
)
"""Answered by the recorder, or of no consequence here."""
# Sent always: a server may have other defaults, such as a model's generation_config.json.
NEUTRAL = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
ALSO_NEUTRAL: dict[str, list[Any]] = {"top_k": [-1], "logit_bias": [{}], "response_format": [{"type": "text"}]}


class Notices:
    """Warnings that are worth seeing once and counting always."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def warn(self, subject: str, text: str) -> None:
        """Prints `text` the first time that `subject` comes up."""
        self.counts[subject] += 1
        if self.counts[subject] == 1:
            print(f"warning: {text} (shown once)", file=sys.stderr, flush=True)


def rewrite(
    request: dict[str, Any], model: str, sampling: SamplingSettings, seed: int, notices: Notices
) -> dict[str, Any]:
    """The request that is sent for an agent's `request`."""
    if others := request.keys() - PASSES - DECIDED:
        _leave_out(request, others, notices)
    for key, decided in (("model", model), ("temperature", sampling.temperature)):
        if request.get(key, decided) not in (decided, None):
            notices.warn(key, f"an agent asked for {key} {request[key]!r}; the run's is {decided!r}, and stays")
    if request.get("tool_choice") not in (None, "auto", "none"):
        notices.warn("tool_choice", "tool_choice makes the server sample under a grammar, which bends what is sampled")
    return {
        **{key: value for key, value in request.items() if key in PASSES},
        **NEUTRAL,
        "model": model,
        "temperature": sampling.temperature,
        "max_tokens": _max_tokens(request, sampling.max_tokens, notices),
        "seed": seed,
        "logprobs": True,
        "return_token_ids": True,
    }


def _leave_out(request: dict[str, Any], keys: set[str], notices: Notices) -> None:
    for key in sorted(keys):
        harmless = [None, *([NEUTRAL[key]] if key in NEUTRAL else []), *ALSO_NEUTRAL.get(key, [])]
        if request[key] not in harmless:
            notices.warn(key, f"an agent asked for {key}, which is left out: it may bend what the policy samples")


def _max_tokens(request: dict[str, Any], most: int, notices: Notices) -> Any:
    asked = [request[key] for key in ("max_completion_tokens", "max_tokens") if request.get(key) is not None]
    if not asked:
        return most
    if isinstance(asked[0], int) and asked[0] > most:
        notices.warn("max_tokens", f"an agent asked for {asked[0]} tokens a call; the run allows {most}")
        return most
    return asked[0]  # The server refuses what is no number.
