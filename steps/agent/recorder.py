"""The recorder between an agent and the policy: it forwards each chat completion and keeps the exact tokens.

One recorder sees one attempt. `Recorder.complete` is the seam: Python agents call it in this process (through
`Policy.chat` or `Policy.client`), all others through the gateway.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from environments.base import Message, RequestRefused, Trajectory
from steps.agent.sampling import Notices, rewrite
from steps.agent.sequences import Call, Conversation, InexactTokens, conversations, read_call
from steps.agent.upstream import Upstream
from steps.common.errors import InvalidInputs, ServerFault
from steps.common.settings import SamplingSettings


@dataclass(frozen=True)
class Recorded:
    """A call's text, for people, and its tokens."""

    messages: list[Message]
    replies: list[Message]
    prompt_tokens: int
    """As the server counts them."""
    completion_tokens: int
    call: Call | None
    """The exact tokens; None where the server tells none."""


class Recorder:
    """Records one attempt. `seed` names it: equal names, equal sampling seeds, call by call."""

    def __init__(self, upstream: Upstream, sampling: SamplingSettings, seed: str, notices: Notices) -> None:
        self.fault: ServerFault | InvalidInputs | InexactTokens | None = None
        """What makes the attempt worthless, whatever the agent makes of it."""
        self._upstream, self._sampling, self._seed, self._notices = upstream, sampling, seed, notices
        self._numbers: Iterator[int] = count()
        self._recorded: dict[int, Recorded] = {}
        self._closed = False

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers an OpenAI chat completion request; streaming is the caller's to imitate.

        Raises `RequestRefused` where the agent is at fault; `ServerFault`, `InvalidInputs` or `InexactTokens` where the
        attempt is lost.
        """
        self._check_open()
        number = next(self._numbers)
        body = self._sent(request, self._seed_of(number))
        try:
            response = await self._upstream.complete(body)
            recorded = self._read(request, response)
        except (ServerFault, InvalidInputs, InexactTokens) as fault:
            self.fault = fault
            raise
        self._check_open()
        self._recorded[number] = recorded
        return self._told(response, request)

    def close(self) -> None:
        """From now on every call is refused: what comes after the reward is not part of the attempt."""
        self._closed = True

    def calls(self) -> list[Recorded]:
        """In the order in which they were begun."""
        return [self._recorded[number] for number in sorted(self._recorded)]

    def conversations(self) -> list[Conversation]:
        """What is trained."""
        return conversations(recorded.call for recorded in self.calls() if recorded.call)

    def transcript(self, ends: list[Conversation]) -> list[Message]:
        """What is read: every conversation to its end, one after the other."""
        calls = self.calls()
        return [
            _plain(message)
            for end in ends
            for message in [*calls[end.call].messages, calls[end.call].replies[end.choice]]
        ]

    def trajectory(self, task_id: str, attempt: int) -> Trajectory:
        """What was recorded, whatever it was worth."""
        ends, calls = self.conversations(), self.calls()
        return Trajectory(
            task_id=task_id,
            attempt=attempt,
            messages=self.transcript(ends),
            sequences=[end.sequence for end in ends if end.sequence.token_ids],
            reward=None,
            turns=len(calls),
            prompt_tokens=sum(recorded.prompt_tokens for recorded in calls),
            completion_tokens=sum(recorded.completion_tokens for recorded in calls),
        )

    def _sent(self, request: dict[str, Any], seed: int) -> dict[str, Any]:
        """What is sent for an agent's request."""
        return rewrite(request, self._upstream.model, self._sampling, seed, self._notices)

    def _read(self, request: dict[str, Any], response: dict[str, Any]) -> Recorded:
        """What is kept of the answer. Raises `InexactTokens`."""
        call = read_call(response)
        replies = [choice["message"] for choice in response["choices"]]
        return Recorded(request["messages"], replies, len(call.prompt_ids), call.completion_tokens, call)

    def _told(self, response: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        """What the agent sees of the answer."""
        return _as_asked(response, request)

    def _check_open(self) -> None:
        if self.fault:
            raise self.fault
        if self._closed:
            raise RequestRefused(404, "this rollout is over")

    def _seed_of(self, number: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 2  # The server adds an index to it for each choice, in 64 bits with sign.


def _as_asked(response: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The response without what only the recorder asked for."""
    if not request.get("return_token_ids"):
        response.pop("prompt_token_ids", None)
    for choice in response["choices"]:
        if not request.get("return_token_ids"):
            choice.pop("token_ids", None)
        if not request.get("logprobs"):
            choice["logprobs"] = None
    return response


def _plain(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None and value != []}
