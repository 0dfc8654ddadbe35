"""The tool calls of an assistant's message, as the server parsed them or as the model wrote them.

A server with a parser hands over `tool_calls`. Without one, or where the parser found none, a call is text in the
form that Hermes, Qwen and others were trained on:

    <tool_call>{"name": "find", "arguments": {"item": "nails"}}</tool_call>
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from environments.base import Message

IN_TEXT = 'Call a tool like this: <tool_call>{"name": "…", "arguments": {…}}</tool_call>\nThe tools:\n'
WRITTEN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call; `problem` says why it can't be made, in words for the model."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def tool_calls(message: Message) -> list[ToolCall]:
    """The calls, in order; those that make no sense among them."""
    parsed = message.get("tool_calls") or []
    if parsed:
        return [_checked(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in parsed]
    return [_read(f"call-{i}", text) for i, text in enumerate(WRITTEN.findall(message.get("content") or ""))]


def as_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def as_message(number: int, name: str, arguments: dict[str, Any]) -> Message:
    """An assistant's message with one call, as the API has it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}],
    }


def calling(number: int, name: str, arguments: dict[str, Any], *, native: bool) -> Message:
    """An assistant's message with one call: as the API has it, or in its text."""
    if native:
        return as_message(number, name, arguments)
    return {"role": "assistant", "content": as_text(name, arguments)}


def told(tools: Sequence[dict[str, Any]]) -> str:
    """How to call them in text, and which there are, for a model whose chat template has no place for tools."""
    return f"{IN_TEXT}{listed(tools)}"


def listed(tools: Sequence[dict[str, Any]]) -> str:
    """OpenAI tools as text, one a line."""
    return "\n".join(json.dumps(tool["function"]) for tool in tools)


def _read(call: str, text: str) -> ToolCall:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall(call, "", {}, "a tool call must be JSON")
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(call, "", {}, 'a tool call must be like {"name": "…", "arguments": {…}}')
    return _checked(call, content["name"], content.get("arguments", {}))


def _checked(call: str, name: str, arguments: Any) -> ToolCall:
    """Arguments may be an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return ToolCall(call, name, {}, "the arguments must be JSON")
    if not isinstance(arguments, dict):
        return ToolCall(call, name, {}, "the arguments must be an object")
    return ToolCall(call, name, arguments)
