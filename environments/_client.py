"""An OpenAI client that talks to a `Complete` function in this process, streaming included.

The whole answer is there before its first event goes out: exact token ids and log-probabilities are checked first.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
from openai import AsyncOpenAI

from environments.base import Complete, RequestRefused

CHAT = "/chat/completions"
INSTEAD = {
    "/messages": "Anthropic's Messages API is not offered, since vLLM gives no token ids there",
    "/responses": "OpenAI's Responses API is not offered, since vLLM gives no exact tokens there (the Agents SDK has "
    "OpenAIChatCompletionsModel)",
    "/completions": "completions of plain text are not offered",
}
"""Why other ways to ask a model are refused, by the end of their path."""


class CompletionTransport(httpx2.AsyncBaseTransport):
    """Answers chat completions from `complete`; anything else is a 404 that says what there is."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            if request.method != "POST" or not request.url.path.endswith(CHAT):
                raise no_such_endpoint(request.method, request.url.path)
            body = json.loads(await request.aread())
            response = await self._complete(body)
        except RequestRefused as refusal:
            return httpx2.Response(refusal.status, json=refusal.body)
        if not body.get("stream"):
            return httpx2.Response(200, json=response)
        text = "".join(f"data: {event}\n\n" for event in stream_events(response, body))
        return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})


def no_such_endpoint(method: str, path: str) -> RequestRefused:
    """The refusal of anything but chat completions."""
    asked = "" if method != "POST" or path.endswith(CHAT) else path[path.rfind("/") :]
    reason = INSTEAD.get(asked, f"there is no {method} {path} here")
    refusal = RequestRefused(404, f"{reason}: use POST …/v1{CHAT}")
    refusal.body["type"] = "error"  # Anthropic's clients want it; OpenAI's do not mind
    return refusal


def stream_events(response: dict[str, Any], request: dict[str, Any]) -> Iterator[str]:
    """A whole answer as OpenAI's stream: a delta and a finish for each choice, usage where asked for, `[DONE]`."""
    head = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in response["choices"]:
        yield json.dumps(head | {"choices": [_chunk(choice, _delta(choice["message"]), choice.get("logprobs"), None)]})
        yield json.dumps(head | {"choices": [_chunk(choice, {}, None, choice["finish_reason"])]})
    if (request.get("stream_options") or {}).get("include_usage"):
        yield json.dumps(head | {"choices": [], "usage": response["usage"]})
    yield "[DONE]"


def _chunk(choice: dict[str, Any], delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": choice["index"], "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls") or [])]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"tool_calls": calls} if calls else rest


def openai_client(complete: Complete, base_url: str, api_key: str) -> AsyncOpenAI:
    """The client; it never retries by itself, since `complete` does."""
    # Proxies of the machine are not for us, and looking for them costs tens of milliseconds a client.
    transport = httpx2.AsyncClient(transport=CompletionTransport(complete), trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=transport, max_retries=0, timeout=None)
