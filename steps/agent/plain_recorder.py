"""The recorder for models of other makers, whose servers tell no token ids: nothing can be learned from what it keeps.

The agent is answered as it is when the policy plays: by the run's temperature and limit, and without what bends what is
sampled. Of vLLM's own parameters nothing is sent.
"""

from typing import Any

from environments.base import Message, TokenSequence
from steps.agent.recorder import Recorded, Recorder
from steps.agent.sequences import Conversation

OPENAI = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "n",
        "stop",
        "reasoning_effort",
        "model",
        "temperature",
        "max_tokens",
        "seed",
    }
)
"""What any server with OpenAI's API may be sent."""
NO_TOKENS = TokenSequence([], [], [])
COUNTS = ("prompt_tokens", "completion_tokens")


class PlainRecorder(Recorder):
    """Records one attempt without tokens: the transcript, and how many tokens its server counted."""

    def conversations(self) -> list[Conversation]:
        """By their messages: one that goes on takes the place of what it goes on from."""
        ends: list[Conversation] = []
        calls = self.calls()
        for index, call in enumerate(calls):
            ends = [end for end in ends if not _goes_on(call.messages, calls[end.call], end.choice)]
            ends += [Conversation(NO_TOKENS, index, choice) for choice in range(len(call.replies))]
        return ends

    def _sent(self, request: dict[str, Any], seed: int) -> dict[str, Any]:
        body = super()._sent(request, seed)
        for key in sorted((body.keys() & request.keys()) - OPENAI - {"logprobs", "top_logprobs"}):
            self._notices.warn(key, f"an agent asked for {key}, which is left out: not every server knows it")
        asked = {key: request[key] for key in ("logprobs", "top_logprobs") if request.get(key)}
        return {key: value for key, value in body.items() if key in OPENAI} | asked

    def _read(self, request: dict[str, Any], response: dict[str, Any]) -> Recorded:
        usage = response.get("usage") or {}
        counts = [usage.get(key) for key in COUNTS]
        if None in counts:
            self._notices.warn("usage", "the server does not say how many tokens a call took: they count as 0")
        replies = [choice["message"] for choice in response["choices"]]
        return Recorded(request["messages"], replies, counts[0] or 0, counts[1] or 0, call=None)

    def _told(self, response: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        """With all that agents and their clients rely on."""
        for choice in response["choices"]:
            choice.setdefault("finish_reason", "stop")
            choice["message"].setdefault("content", None)
        usage = dict.fromkeys((*COUNTS, "total_tokens"), 0) | (response.get("usage") or {})
        head = {"id": "chatcmpl", "object": "chat.completion", "created": 0, "model": request.get("model")}
        return head | response | {"usage": usage}


def _goes_on(messages: list[Message], before: Recorded, choice: int) -> bool:
    """Do `messages` begin with a call's own and its answer?"""
    whole = [*before.messages, before.replies[choice]]
    return len(messages) >= len(whole) and all(_text(a) == _text(b) for a, b in zip(messages, whole, strict=False))


def _text(message: Message) -> tuple[Any, Any]:
    """What an agent that goes on leaves as it was."""
    return message.get("role"), message.get("content") or ""
