"""What the e-mail environments share: the mails, the questions, when an answer is right, and scripted players."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from environments._mail_attempt import Attempt, Question, opening, same
from environments._mail_corpus import TODAY, Asked, corpus
from environments._mail_enron import enron_store
from environments._mail_judge import Judge
from environments._mail_players import at_random, badly, plan, well
from environments._mail_store import MailStore
from environments._tasks_file import read_tasks
from environments._tool_calls import calling
from environments.base import Environment, Message, Player, Result, Split, Task, UnknownEnvironment

HELD_OUT = 4
"""The questions to each fourth person are the test split."""


class MailEnvironment(Environment):
    """Questions about inboxes."""

    mails: Annotated[int, Field(ge=50, le=5000)] = 3000
    """How many are made up; there is a question to every four or five."""
    corpus_seed: int = 0
    """Equal seeds, equal mails and questions."""
    enron: Path | None = None
    """The public Enron mails as a CSV with the columns `file` and `message`, in place of the made-up ones."""
    questions: Path | None = None
    """About those, as JSONL: `{"id": …, "split": …, "question": …, "answer": …, "message_ids": […], "inbox_address": …,
    "query_date": …}`."""
    judge: Judge | None = None
    """Asked about an answer that is not word for word the known one; without it such an answer is wrong."""
    max_turns: PositiveInt = 10
    """After them the attempt ends."""
    max_results: PositiveInt = 10
    """Most hits of a search."""
    test_tasks: PositiveInt = 128
    """Held-out tasks at most, where the mails are made up."""

    @property
    def is_native(self) -> bool:
        """Are the tools in the requests, and not in the text of the messages?"""
        return True

    @model_validator(mode="after")
    def _enron_has_questions(self) -> Self:
        if (self.enron is None) != (self.questions is None):
            raise ValueError("`enron` and `questions` go together: mails, and what is asked about them")
        return self

    def tasks(self, split: Split) -> Sequence[Task]:
        if self.questions:
            return [self._checked(task) for task in read_tasks(self.questions, split)]
        tasks = [
            Task(id=f"{split}-{number}", data=question.model_dump(mode="json"))
            for number, question in enumerate(made_up_questions(self.corpus_seed, self.mails)[split])
        ]
        return tasks if split == "train" else tasks[: self.test_tasks]

    def attempt(self, task: Task) -> Attempt:
        """A new attempt at a task."""
        return Attempt(Question.model_validate(task.data), self._store(), self.max_turns, self.max_results)

    def opening(self, question: Question) -> list[Message]:
        """The messages with which an attempt begins."""
        return opening(question, self.max_turns)

    async def result(self, attempt: Attempt) -> Result:
        """What an attempt that is over was worth. Raises what the judge raises."""
        attempt.correct = await self._is_right(attempt)
        return Result(
            reward=attempt.reward(),
            metrics=attempt.metrics(),
            metadata={"ending": attempt.ending, "answer": attempt.answer},
        )

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """How a good agent works on the training questions."""
        tasks = self.tasks("train")
        while True:
            attempt = self.attempt(random.choice(tasks))
            messages = self.opening(attempt.question)
            for number, call in enumerate(plan(attempt.question)):
                said = calling(number, *call, native=self.is_native)
                messages += [said, *attempt.take(said)]
                if attempt.ending:
                    break
            yield messages if messages[-1]["role"] == "assistant" else messages[:-1]

    def players(self) -> Sequence[Player]:
        known = {
            self.opening(question)[1]["content"]: question
            for split in ("train", "test")
            for question in (Question.model_validate(task.data) for task in self.tasks(split))
        }
        return (
            Player("best", lambda messages, random: well(known[messages[1]["content"]], messages), (1.35, 1.49)),
            Player("random", at_random, (-1.0, -0.6)),
            Player("worst", badly, (-2.0, -2.0)),
        )

    async def _is_right(self, attempt: Attempt) -> bool:
        question = attempt.question
        if attempt.ending == "dont_know" or question.answer is None:
            return attempt.ending == "dont_know" and question.answer is None
        if attempt.ending != "answered":
            return False
        if same(attempt.answer, question.answer):
            return True
        return self.judge is not None and await self.judge.agrees(question.question, question.answer, attempt.answer)

    def _store(self) -> MailStore:
        return enron_mails(self.enron) if self.enron else made_up_mails(self.corpus_seed, self.mails)

    def _checked(self, task: Task) -> Task:
        try:
            question = Question.model_validate(task.data)
        except ValidationError as error:
            where, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
            raise UnknownEnvironment(
                f"{self.questions}: the question {task.id!r}, {'.'.join(map(str, where))}: {what}"
            ) from None
        for name in question.message_ids:
            if not self._store().read(question.inbox_address, name):
                raise UnknownEnvironment(
                    f"{self.questions}: the question {task.id!r} needs the mail {name}, which is not in the inbox of "
                    f"{question.inbox_address} in {self.enron}"
                )
        return task


@cache
def made_up_mails(seed: int, count: int) -> MailStore:
    """Made once a process, in some 0.2 s for 3,000."""
    return MailStore.in_memory(corpus(seed, count).mails)


@cache
def enron_mails(file: Path) -> MailStore:
    """Opened once a process."""
    return enron_store(file)


@cache
def made_up_questions(seed: int, count: int) -> dict[Split, list[Question]]:
    """By split: no inbox is in both."""
    made = corpus(seed, count)
    held_out = set(made.people[::HELD_OUT])
    splits: dict[Split, list[Question]] = {"train": [], "test": []}
    for asked in made.questions:
        splits["test" if asked.person in held_out else "train"].append(_question(asked))
    return splits


def _question(asked: Asked) -> Question:
    return Question(
        question=asked.question,
        answer=asked.answer,
        message_ids=tuple(mail.message_id for mail in asked.sources),
        inbox_address=asked.person.address,
        query_date=TODAY,
        searches=asked.searches,
    )
