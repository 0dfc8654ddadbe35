"""Chats as OpenAI's API has them, a JSON object a line: checked, and brought into the form that chat templates take."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs

CHATS = "chats.jsonl"
SHOWN = 10
"""Bad lines that an error names."""


def _parsed(arguments: Any) -> Any:
    """The API has JSON here; templates take the object, which servers give them."""
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


class _Open(BaseModel):
    """Keeps keys that it does not know: templates may."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ChatFunction(_Open):
    """What a tool call calls."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class ChatToolCall(_Open):
    """One call of an assistant's message."""

    function: ChatFunction


class ChatMessage(_Open):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(lambda text: "" if text is None else text)] = ""
    tool_calls: list[ChatToolCall] | None = None


class Chat(Record):
    """A conversation to imitate: what its assistant says."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    """As the template is to show them to the model."""

    @model_validator(mode="after")
    def _has_something_to_imitate(self) -> Self:
        said = [message for message in self.messages if message.role == "assistant"]
        if not said:
            raise ValueError("no message is the assistant's: there is nothing to imitate")
        if not all(message.content or message.tool_calls for message in said):
            raise ValueError("an assistant's message has neither content nor tool_calls")
        return self

    def line(self) -> str:
        """The chat as a line of a file."""
        return self.model_dump_json(exclude_none=True) + "\n"


def read_chats(file: Path) -> list[Chat]:
    """All chats of a file; empty lines are none. Raises `InvalidInputs`: a line for each one that is wrong."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInputs(f"can't read the chats in {file}: {error.strerror}") from None
    return checked((f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())


def checked(found: Iterable[tuple[str, bytes | dict[str, Any]]]) -> list[Chat]:
    """The chats in JSON or objects, each with the name of its place. Raises `InvalidInputs` as `read_chats` does."""
    chats, wrong = [], []
    for place, given in found:
        try:
            chats.append(Chat.model_validate_json(given) if isinstance(given, bytes) else Chat.model_validate(given))
        except ValidationError as error:
            wrong.append(f"{place}: {_why(error)}")
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise InvalidInputs("\n".join([*wrong[:SHOWN], *more]))
    return chats


def stored_chats(file: Path) -> Iterator[Chat]:
    """Those in a file that holds what `Chat.line` writes."""
    with file.open(encoding="utf-8") as lines:
        yield from map(Chat.model_validate_json, lines)


def _why(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    return f"{where}: {reason}" if where else reason
