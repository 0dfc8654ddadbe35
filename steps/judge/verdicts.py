"""What the judge answers: checked to the last score, since not every server follows a schema."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError


class BadAnswer(Exception):
    """An answer that can't be used. The message says why, for the judge and for people."""


class Verdict(BaseModel):
    """What one attempt is worth, beside the others of its group."""

    explanation: str = ""
    score: float = Field(ge=0, le=1, strict=True)


VERDICTS = TypeAdapter(dict[str, Verdict])


def verdicts_in(content: str | None, attempts: Sequence[str]) -> list[Verdict]:
    """A verdict for each of `attempts`, in their order. Raises `BadAnswer`."""
    given = _document(content or "")
    if missing := [name for name in attempts if name not in given]:
        raise BadAnswer(f"there is no score for {', '.join(missing)}")
    if strangers := [name for name in given if name not in attempts]:
        raise BadAnswer(f"there is no {', '.join(strangers)}: the attempts are {', '.join(attempts)}")
    try:
        verdicts = VERDICTS.validate_python(given)
    except ValidationError as error:
        raise BadAnswer("; ".join(_explained(error))) from None
    return [verdicts[name] for name in attempts]


def _document(content: str) -> dict[str, Any]:
    """The JSON object in the answer, whatever stands around it."""
    text = content[content.find("{") : content.rfind("}") + 1]
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise BadAnswer(f"it is not a JSON object ({error})") from None
    assert isinstance(document, dict)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadAnswer(f"{next(key for key in keys if keys.count(key) > 1)} is there twice")
    return document


def _explained(error: ValidationError) -> list[str]:
    return [f"{'.'.join(map(str, item['loc']))} is {item['input']!r}: {item['msg']}" for item in error.errors()]
