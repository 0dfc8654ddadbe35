"""Scripted players of the e-mail environments, and conversations to learn their form from."""

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from environments._mail_attempt import DONT_KNOW, Question
from environments._tool_calls import as_text
from environments.base import Message

Call = tuple[str, dict[str, Any]]


def plan(question: Question) -> Iterator[Call]:
    """What a good agent calls: it looks for each mail and reads it, then answers."""
    for number, keywords in enumerate(question.searches):
        yield "search_inbox", {"keywords": keywords.split()}
        if number < len(question.message_ids):
            yield "read_email", {"message_id": question.message_ids[number]}
    answer = question.answer or DONT_KNOW
    yield "return_final_answer", {"answer": answer, "message_ids": list(question.message_ids)}


def well(question: Question, messages: Sequence[Message]) -> str:
    """The next call of the plan."""
    return as_text(*list(plan(question))[_turn(messages)])


def at_random(messages: Sequence[Message], random: Random) -> str:
    """Looks for a word of the question, reads a mail if there is one, and answers one of its words."""
    seen = json.loads(messages[-1]["content"]) if messages[-1]["role"] == "tool" else {}
    if isinstance(seen, list) and seen:
        return as_text("read_email", {"message_id": random.choice(seen)["message_id"]})
    if isinstance(seen, dict) and "body" in seen:
        answer = {"answer": random.choice(seen["body"].split()), "message_ids": [seen["message_id"]]}
        return as_text("return_final_answer", answer)
    return as_text("search_inbox", {"keywords": [random.choice(str(messages[1]["content"]).split())]})


def badly(messages: Sequence[Message], random: Random) -> str:
    """Asks for a mail that isn't there, then talks."""
    return "Hello?" if _turn(messages) else as_text("read_email", {"message_id": "none"})


def _turn(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)
