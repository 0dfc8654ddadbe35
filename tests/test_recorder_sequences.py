"""Recorded calls become sequences in which each sampled token is trained once, in the context it was sampled in."""

import math
from typing import Any

import pytest

from environments import TokenSequence
from steps.agent.sequences import Call, Choice, InexactTokens, conversations, read_call

# A call: its prompt, and the tokens of each choice. The log-probability of a token t is -t/8.
Calls = list[tuple[list[int], list[list[int]]]]
# A sequence as text: context bare, sampled tokens in brackets.
CASES: dict[str, tuple[Calls, list[str]]] = {
    "one call": ([([1, 2], [[3, 4]])], ["1 2 [3] [4]"]),
    "extended": ([([1], [[2]]), ([1, 2, 5], [[6]]), ([1, 2, 5, 6, 7], [[8]])], ["1 [2] 5 [6] 7 [8]"]),
    "nothing new to read": ([([1], [[2]]), ([1, 2], [[3]])], ["1 [2] [3]"]),
    "dropped history": ([([1], [[2]]), ([5], [[6]]), ([5, 6, 7], [[8]])], ["1 [2]", "5 [6] 7 [8]"]),
    # The second prompt lacks token 3, which the model thought and the template hid.
    "hidden tokens": ([([1], [[2, 3, 4]]), ([1, 2, 4, 5], [[6]])], ["1 [2] [3] [4]", "1 2 4 5 [6]"]),
    "other spelling": ([([1], [[2, 3]]), ([1, 23, 5], [[6]])], ["1 [2] [3]", "1 23 5 [6]"]),
    "shorter prompt": ([([1, 2], [[3]]), ([1], [[4]])], ["1 2 [3]", "1 [4]"]),
    "choices": ([([1], [[2], [3], [4]])], ["1 [2]", "1 [3]", "1 [4]"]),
    "choices in a later turn": (
        [([1], [[2]]), ([1, 2, 5], [[6], [7]])],
        ["1 [2] 5 [6]", "1 2 5 [7]"],
    ),
    "goes on with the second choice": (
        [([1], [[2], [3]]), ([1, 3, 5], [[6]])],
        ["1 [2]", "1 [3] 5 [6]"],
    ),
    "goes on with both choices": (
        [([1], [[2], [3]]), ([1, 3, 5], [[6]]), ([1, 2, 5], [[7]])],
        ["1 [2] 5 [7]", "1 [3] 5 [6]"],
    ),
    # The shared token 2 is trained in the first branch only.
    "branch": (
        [([1], [[2]]), ([1, 2, 5], [[6]]), ([1, 2, 7], [[8]])],
        ["1 [2] 5 [6]", "1 2 7 [8]"],
    ),
    "same prompt twice": ([([1], [[2]]), ([1], [[3]])], ["1 [2]", "1 [3]"]),
    "equal choices": ([([1], [[2], [2]]), ([1, 2, 3], [[4]])], ["1 [2] 3 [4]", "1 [2]"]),
    "longest prefix wins": (
        [([1], [[2]]), ([1, 9], [[3]]), ([1, 9, 3, 4], [[5]]), ([1, 2, 6], [[7]])],
        ["1 [2] 6 [7]", "1 9 [3] 4 [5]"],
    ),
    "sub-agent": (
        [([1], [[2]]), ([50], [[51]]), ([50, 51, 52], [[53]]), ([1, 2, 3], [[4]])],
        ["1 [2] 3 [4]", "50 [51] 52 [53]"],
    ),
    "nothing was asked": ([], []),
}


def calls_of(case: Calls) -> list[Call]:
    return [Call(prompt, [Choice(ids, [-t / 8 for t in ids]) for ids in choices]) for prompt, choices in case]


def as_text(sequence: TokenSequence) -> str:
    lists = zip(sequence.token_ids, sequence.mask, strict=True)
    return " ".join(f"[{token}]" if sampled else str(token) for token, sampled in lists)


@pytest.mark.parametrize("name", CASES)
def test_calls_become_sequences(name: str) -> None:
    calls, expected = CASES[name]
    sequences = [conversation.sequence for conversation in conversations(calls_of(calls))]
    assert [as_text(sequence) for sequence in sequences] == expected
    for sequence in sequences:
        wanted = [-t / 8 if hit else 0.0 for t, hit in zip(sequence.token_ids, sequence.mask, strict=True)]
        assert sequence.logprobs == wanted


@pytest.mark.parametrize("name", CASES)
def test_every_sampled_token_is_trained_once(name: str) -> None:
    calls = calls_of(CASES[name][0])
    trained = sum(sum(conversation.sequence.mask) for conversation in conversations(calls))
    assert trained == sum(call.completion_tokens for call in calls)


def test_a_conversation_says_which_answer_it_ends_with() -> None:
    calls, _ = CASES["goes on with the second choice"]
    assert [(c.call, c.choice) for c in conversations(calls_of(calls))] == [(0, 0), (1, 0)]


def response(**changes: Any) -> dict[str, Any]:
    choice = {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}}
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    return {"prompt_token_ids": [1, 2], "choices": [choice | changes.pop("choice", {})], "usage": usage} | changes


def test_a_response_is_read_exactly() -> None:
    assert read_call(response()) == Call([1, 2], [Choice([3, 4], [-0.5, -1.5])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": None}, "no prompt_token_ids"),
        ({"choice": {"token_ids": None}}, "no token_ids"),
        ({"choice": {"logprobs": None}}, "2 tokens and gave 0 log-prob"),
        ({"choice": {"logprobs": {"content": [{"logprob": -1}]}}}, "2 tokens and gave 1 log-prob"),
        ({"choice": {"logprobs": {"content": [{"logprob": -1}, {"logprob": None}]}}}, "token 1 is None"),
        ({"choice": {"logprobs": {"content": [{"logprob": math.nan}, {"logprob": -1}]}}}, "token 0 is nan"),
        ({"choice": {"logprobs": {"content": [{"logprob": math.inf}, {"logprob": -1}]}}}, "token 0 is inf"),
        ({"choice": {"logprobs": {"content": [{"logprob": -math.inf}, {"logprob": -1}]}}}, "token 0 is -inf"),
        (
            {"usage": {"prompt_tokens": 3, "completion_tokens": 2}},
            r"2 prompt tokens were recorded, the server.* 3",
        ),
        (
            {"usage": {"prompt_tokens": 2, "completion_tokens": 1}},
            r"2 sampled tokens were recorded, the server.* 1",
        ),
    ],
)
def test_what_is_not_exact_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InexactTokens, match=message):
        read_call(response(**changes))
