"""One attempt to answer a question from an inbox: its tools, what came of them, and what it is worth.

The tools are plain methods that raise for what they can't take, so that any agent can be given them, in any framework.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache, cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from environments._mail_store import MailStore
from environments._tool_calls import ToolCall, tool_calls
from environments.base import Message

LONGEST_BODY = 5000
"""Characters of a mail that are read out."""
DONT_KNOW = "I don't know"
ONE_CALL = "not done: a turn is one call"

Ending = Literal["no_call", "unknown_tool", "bad_arguments", "answered", "dont_know", "out_of_turns"]
WORTH: dict[Ending, float] = {
    "no_call": -2.0,
    "unknown_tool": -1.9,
    "bad_arguments": -1.8,
    "answered": -1.0,
    "dont_know": 0.0,
    "out_of_turns": 0.0,
}
"""Of an attempt that is not right, without what it gets for its parts."""


class Question(BaseModel):
    """What is asked, and what is right. Fields that it does not know are no matter."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: str | None = None
    """None where no mail tells."""
    message_ids: tuple[str, ...] = ()
    """Where it stands: all of these mails are needed."""
    inbox_address: str
    query_date: date
    searches: tuple[str, ...] = ()
    """Keywords that lead to the mails, for scripted players."""


class SearchInbox(BaseModel):
    """Searches the inbox for mails that hold all keywords; lists the best in brief. Days are YYYY-MM-DD."""

    model_config = ConfigDict(extra="forbid")

    keywords: list[str] = Field(min_length=1)
    sent_from: str | None = None
    sent_to: str | None = None
    after: date | None = None
    before: date | None = None


class ReadEmail(BaseModel):
    """Reads a whole mail."""

    model_config = ConfigDict(extra="forbid")

    message_id: str


class ReturnFinalAnswer(BaseModel):
    """Ends with the answer, and the mails that it comes from."""

    model_config = ConfigDict(extra="forbid")

    answer: str
    message_ids: list[str]


@dataclass
class Attempt:
    """What an agent has done so far."""

    question: Question
    store: MailStore
    max_turns: int
    max_results: int
    turns: int = 0
    """Answers of the model."""
    found: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    invalid_reads: int = 0
    ending: Ending | None = None
    answer: str = ""
    named: tuple[str, ...] = ()
    """Mails that the answer is said to come from."""
    correct: bool = False

    def search_inbox(self, given: SearchInbox) -> str:
        """The mails that fit best, in brief, as JSON."""
        hits = self.store.search(self.question.inbox_address, most=self.max_results, **dict(given))
        self.found |= {hit.message_id for hit in hits}
        return json.dumps([asdict(hit) for hit in hits], ensure_ascii=False)

    def read_email(self, given: ReadEmail) -> str:
        """A whole mail, as JSON."""
        mail = self.store.read(self.question.inbox_address, given.message_id)
        if not mail:
            self.invalid_reads += 1
            return json.dumps({"error": "there is no such mail in this inbox"})
        self.read.add(mail.message_id)
        cut = len(mail.body) - LONGEST_BODY
        body = f"{mail.body[:LONGEST_BODY]} … ({cut} characters more)" if cut > 0 else mail.body
        return json.dumps(asdict(mail) | {"body": body}, ensure_ascii=False)

    def return_final_answer(self, given: ReturnFinalAnswer) -> str:
        """Ends the attempt. Whether the answer is right is found out later: a judge may have to be asked."""
        self.answer, self.named = given.answer, tuple(given.message_ids)
        self.ending = "dont_know" if same(given.answer, DONT_KNOW) else "answered"
        return "received"

    def take(self, reply: Message) -> list[Message]:
        """Goes on with what the model replied; the answers of its tool calls, of which only the first is made."""
        self.turns += 1
        calls = tool_calls(reply)
        if not calls or not calls[0].name:
            self.ending = "no_call"
            return []
        answers = [self._make(calls[0]), *(ONE_CALL for _ in calls[1:])]
        if not self.ending and self.turns == self.max_turns:
            self.ending = "out_of_turns"
        return [
            {"role": "tool", "tool_call_id": call.id, "content": answer}
            for call, answer in zip(calls, answers, strict=True)
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs a tool. Raises `ValidationError` for what it can't take."""
        result: str = getattr(self, name)(TOOLS[name].model_validate(arguments))
        return result

    def _make(self, call: ToolCall) -> str:
        if call.name not in TOOLS:
            self.ending = "unknown_tool"
            return f"there is no tool {call.name!r}"
        try:
            if not call.problem:
                return self.call(call.name, call.arguments)
            problem = call.problem
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
        self.ending = "bad_arguments"
        return f"these arguments can't be taken: {problem}"

    @cached_property
    def sources(self) -> set[str]:
        """Mails that are needed."""
        return set(self.question.message_ids)

    @property
    def found_sources(self) -> bool:
        """Did searches show all mails that are needed?"""
        return bool(self.sources) and self.sources <= self.found

    @property
    def read_sources(self) -> bool:
        """Were all of them read?"""
        return bool(self.sources) and self.sources <= self.read

    @property
    def named_sources(self) -> bool:
        """Does the answer name all of them; or none, where there is nothing to find?"""
        if self.sources:
            return self.ending == "answered" and self.sources <= set(self.named)
        return self.ending == "dont_know" and not self.named

    def reward(self) -> float:
        """What the attempt is worth, see `environments.email_search`."""
        assert self.ending
        if self.correct:
            brevity = 0.1 / len(self.named) if self.named else 0.0
            return 1 + 0.3 * self.named_sources + brevity + 0.1 * (1 - self.turns / self.max_turns)
        parts = (self.found_sources, self.read_sources, not self.invalid_reads, self.named_sources)
        return WORTH[self.ending] + 0.1 * sum(parts)

    def metrics(self) -> dict[str, float]:
        """What happened, in numbers."""
        return {
            "turns": self.turns,
            "correct": self.correct,
            "found_sources": self.found_sources,
            "read_sources": self.read_sources,
            "named_sources": self.named_sources,
            "named": len(self.named),
            "invalid_reads": self.invalid_reads,
            **{ending: self.ending == ending for ending in WORTH},
        }


TOOLS: Mapping[str, type[BaseModel]] = {
    "search_inbox": SearchInbox,
    "read_email": ReadEmail,
    "return_final_answer": ReturnFinalAnswer,
}


def same(one: str, other: str) -> bool:
    """Are two answers equal but for capitals, articles, spaces, and marks that are not within a word or number?"""
    return _normal(one) == _normal(other)


def _normal(answer: str) -> list[str]:
    text = re.sub(r"(?<=\d),(?=\d{3})|['\u2019]", "", answer.casefold())
    words = re.findall(r"[^\W_]+(?:[-.:/][^\W_]+)*", text)
    return [word for word in words if word not in ("a", "an", "the")]


@cache
def openai_tools() -> list[dict[str, Any]]:
    """The tools as OpenAI's API has them."""
    return [{"type": "function", "function": _function(name, model)} for name, model in TOOLS.items()]


def _function(name: str, model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    properties = {
        name: {k: v for k, v in given.items() if k != "title"} for name, given in schema["properties"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema["required"]}
    return {"name": name, "description": model.__doc__, "parameters": parameters}


def opening(question: Question, max_turns: int) -> list[Message]:
    """The messages with which an attempt begins."""
    rules = (
        f"You answer a question from somebody's e-mails. Search the inbox, read mails, then call return_final_answer "
        f"with the bare fact and the message_ids that it comes from. Where no mail tells, answer: {DONT_KNOW}. "
        f"You have {max_turns} turns, and each is one tool call."
    )
    asked = f"Inbox: {question.inbox_address}\nToday: {question.query_date}\n{question.question}"
    return [{"role": "system", "content": rules}, {"role": "user", "content": asked}]
