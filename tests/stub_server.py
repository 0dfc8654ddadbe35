"""A stand-in for vLLM's chat completions: same shape, no model, all of it deterministic.

A token is a byte, or one of two marks. What it says is chosen by `reply`, what goes wrong by `fault`. It keeps every
request it saw. It runs beside a test, or alone:

    python tests/stub_server.py PORT
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from random import Random
from typing import Any

from aiohttp import web
from threaded_server import ThreadedServer

START, END = 256, 257
KEY = "stub-key"
MODEL = "policy"

Request = dict[str, Any]


def render(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt's tokens, as a ChatML template would have them."""
    tokens: list[int] = []
    for message in messages:
        tokens += [START, *f"{message['role']}\n{text_of(message)}".encode("utf-8", "surrogatepass"), END, *b"\n"]
    return [*tokens, START, *b"assistant\n"]


def render_last_turn(messages: list[dict[str, Any]]) -> list[int]:
    """A template that forgets all but the last message."""
    return render(messages[-1:])


def text_of(message: dict[str, Any]) -> str:
    """What the model wrote or read, tool calls in Hermes' form."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [json.dumps({"name": f["name"], "arguments": f["arguments"]}) for f in functions]
    return (message.get("content") or "") + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def random_letters(request: Request, choice: int) -> str:
    """Some text that depends on the sampling seed alone."""
    random = Random(f"{request.get('seed')}/{choice}")
    return "".join(random.choices("abc123", k=random.randint(1, 6)))


class StubServer(ThreadedServer):
    """Use it as a context manager; `url` ends in `/v1`."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(web.post("/v1/chat/completions", self._chat), port=port)
        self.requests: list[Request] = []
        self.reply: Callable[[Request, int], str] = random_letters
        self.fault: Callable[[int], int | None] = lambda number: None
        """Given the number of requests before, the status of a failure; 0 cuts the connection; None is fine."""
        self.render = render
        self.spoil: Callable[[dict[str, Any]], object] = lambda response: None
        """Changes a response before it is sent."""
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a step here."""
        return {
            "NIGHTSCHOOL_POLICY_URL": self.url,
            "NIGHTSCHOOL_POLICY_KEY": KEY,
            "NIGHTSCHOOL_POLICY_MODEL": MODEL,
        }

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = await http.json()
        number = len(self.requests)
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        status = self.fault(number)
        if status == 0:
            assert http.transport is not None
            http.transport.abort()
        if status is not None:
            return web.json_response({"error": {"message": f"stub says {status}"}}, status=status or 500)
        response = self._answer(request)
        self.spoil(response)
        return web.Response(text=json.dumps(response), content_type="application/json")

    def _answer(self, request: Request) -> dict[str, Any]:
        prompt = self.render(request["messages"])
        choices = [self._choice(request, index) for index in range(request.get("n") or 1)]
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        return {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion",
            "created": 1,
            "model": request["model"],
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
            "prompt_token_ids": prompt,
        }

    def _choice(self, request: Request, index: int) -> dict[str, Any]:
        text = self.reply(request, index)
        tokens = [*text.encode("utf-8", "surrogatepass"), END][: request["max_tokens"]]
        finished = tokens[-1] == END
        return {
            "index": index,
            "message": _message(bytes(token for token in tokens if token < 256).decode("utf-8", "replace")),
            "logprobs": {"content": [{"token": str(t), "logprob": -((t % 7) + 1) / 8} for t in tokens]},
            "finish_reason": "stop" if finished else "length",
            "stop_reason": None,
            "token_ids": tokens,
        }


def _message(text: str) -> dict[str, Any]:
    if not text.startswith("<tool_call>"):
        return {"role": "assistant", "content": text, "tool_calls": [], "refusal": None}
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}


if __name__ == "__main__":
    with StubServer(int(sys.argv[1])):
        threading.Event().wait()
