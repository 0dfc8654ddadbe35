"""From recorded calls to the token sequences that are trained.

A call whose prompt extends a known sequence, token for token, goes on with it: what is new in the prompt is context,
what the model sampled is trained. Where no sequence is a prefix of the prompt (a template that drops earlier thinking,
a compacted history, a sub-agent), a new one starts, all of its prompt context. So each sampled token is trained once,
under exactly the context it was sampled in.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from environments.base import TokenSequence


class InexactTokens(Exception):
    """The server's answer does not say exactly what was sampled, so nothing can be learned from it."""


@dataclass(frozen=True)
class Choice:
    """One sampled completion; both lists have its length."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, at the sampling temperature."""


@dataclass(frozen=True)
class Call:
    """What the model read and what it answered."""

    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def completion_tokens(self) -> int:
        """Over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True)
class Conversation:
    """Messages that extend one another, and which answer they end with."""

    sequence: TokenSequence
    """Empty where the server tells no tokens."""
    call: int
    """Index of its last call."""
    choice: int
    """Index among that call's choices."""


def read_call(response: dict[str, Any]) -> Call:
    """The exact tokens in a chat completion of vLLM that was asked for `logprobs` and `return_token_ids`.

    Raises `InexactTokens` where some are missing, are not finite, or do not add up to the server's own `usage`.
    """
    call = Call(_token_ids(response, "prompt_token_ids"), [_choice(choice) for choice in response["choices"]])
    _compare("prompt", len(call.prompt_ids), response["usage"]["prompt_tokens"])
    _compare("sampled", call.completion_tokens, response["usage"]["completion_tokens"])
    return call


def conversations(calls: Iterable[Call]) -> list[Conversation]:
    """The sequences of an attempt, given its calls in the order they were made."""
    open_ones: list[Conversation] = []
    for number, call in enumerate(calls):
        start = _longest_prefix(open_ones, call.prompt_ids)
        known = _nothing() if start is None else open_ones[start].sequence
        for index, choice in enumerate(call.choices):
            if index == 0 and start is not None:
                open_ones[start] = Conversation(_extend(known, call.prompt_ids, choice), number, index)
            else:
                # The other choices share the prompt; what was sampled in it is already trained in the first's sequence.
                base = known if index == 0 else _nothing()
                open_ones.append(Conversation(_extend(base, call.prompt_ids, choice), number, index))
    return open_ones


def _longest_prefix(candidates: list[Conversation], prompt: list[int]) -> int | None:
    lengths = [
        (len(tokens), -index)
        for index, tokens in enumerate(candidate.sequence.token_ids for candidate in candidates)
        if prompt[: len(tokens)] == tokens
    ]
    return -max(lengths)[1] if lengths else None


def _nothing() -> TokenSequence:
    return TokenSequence([], [], [])


def _extend(known: TokenSequence, prompt: list[int], choice: Choice) -> TokenSequence:
    context, sampled = len(prompt) - len(known.token_ids), len(choice.token_ids)
    return TokenSequence(
        token_ids=prompt + choice.token_ids,
        mask=known.mask + [False] * context + [True] * sampled,
        logprobs=known.logprobs + [0.0] * context + choice.logprobs,
    )


def _choice(choice: dict[str, Any]) -> Choice:
    token_ids = _token_ids(choice, "token_ids")
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(token_ids):
        raise InexactTokens(f"the server sampled {len(token_ids)} tokens and gave {len(logprobs)} log-probabilities")
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value):
            raise InexactTokens(f"the log-probability of sampled token {position} is {value}")
    return Choice(token_ids, logprobs)


def _token_ids(holder: dict[str, Any], key: str) -> list[int]:
    token_ids: list[int] | None = holder.get(key)
    if not token_ids:
        raise InexactTokens(f"the server gave no {key}: is it a vLLM that knows `return_token_ids`?")
    return token_ids


def _compare(what: str, recorded: int, counted: int) -> None:
    if recorded != counted:
        raise InexactTokens(f"{recorded} {what} tokens were recorded, the server counted {counted}")
