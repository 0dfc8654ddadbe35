"""Attempts at questions about made-up mails, and what each is worth, by hand from the formula of `email_search`.

Of a question, S is the mail that it comes from (S1, S2 where it is two), N another one of the inbox.
"""

from collections.abc import Callable

from environments import Environment, Task
from environments._mail_attempt import DONT_KNOW, Question
from environments._tool_calls import as_text

Replies = Callable[[Question], list[str]]
SEARCHED = as_text("search_inbox", {"keywords": ["zebra"]})
MISSED = as_text("read_email", {"message_id": "none"})


def found(question: Question) -> list[str]:
    return [as_text("search_inbox", {"keywords": words.split()}) for words in question.searches]


def read(question: Question) -> list[str]:
    return [as_text("read_email", {"message_id": name}) for name in question.message_ids]


def said(answer: str | None, *names: str) -> str:
    return as_text("return_final_answer", {"answer": answer, "message_ids": list(names)})


def right(question: Question, *more: str) -> str:
    return said(question.answer, *question.message_ids, *more)


# Kind of question, what is replied, the reward.
REWARDS: dict[str, tuple[str, Replies, float]] = {
    # 1 + 0.3 + 0.1/1 + 0.1 (1 - 1/10)
    "right at once": ("plain", lambda q: [right(q)], 1.49),
    # 1 + 0.3 + 0.1/1 + 0.1 (1 - 3/10)
    "right after a look": ("plain", lambda q: [*found(q), *read(q), right(q)], 1.47),
    # 1 + 0.3 + 0.1/1 + 0.1 (1 - 10/10)
    "right in the last turn": ("plain", lambda q: [*[SEARCHED] * 9, right(q)], 1.4),
    # 1 + 0.3 + 0.1/2 + 0.09
    "right, and a mail too many": ("plain", lambda q: [right(q, "N")], 1.44),
    # 1 + 0 + 0.1/1 + 0.09
    "right, from another mail": ("plain", lambda q: [said(q.answer, "N")], 1.19),
    # 1 + 0 + 0 + 0.09
    "right, from nowhere": ("plain", lambda q: [said(q.answer)], 1.09),
    # 1 + 0.3 + 0.1/1 + 0.1 (1 - 2/10): a mail that isn't there costs a turn
    "right after a miss": ("plain", lambda q: [MISSED, right(q)], 1.48),
    # -1 + p, p = 0.1 for no miss
    "wrong at once": ("plain", lambda q: [said("yes", "N")], -0.9),
    # p = 0.1 found + 0.1 read + 0.1 no miss + 0.1 named
    "wrong after all that is right": ("plain", lambda q: [*found(q), *read(q), said("yes", *q.message_ids)], -0.6),
    # p = 0.1 named, after a miss
    "wrong after a miss": ("plain", lambda q: [MISSED, said("yes", *q.message_ids)], -0.9),
    # 0 + p, p = 0.1 found + 0.1 no miss
    "doesn't know": ("plain", lambda q: [*found(q), said(DONT_KNOW)], 0.2),
    # what is named with it does not count
    "doesn't know from where": ("plain", lambda q: [said("i don\u2019t know.", *q.message_ids)], 0.1),
    # 0 + p, p = 0.1 found + 0.1 read + 0.1 no miss
    "goes on forever": ("plain", lambda q: [*found(q), *read(q), *[SEARCHED] * 8], 0.3),
    # -2 + p
    "talks": ("plain", lambda q: ["It is a yes."], -1.9),
    "talks after a miss": ("plain", lambda q: [MISSED, ""], -2.0),
    "talks after a look": ("plain", lambda q: [*found(q), *read(q), "It is a yes."], -1.7),
    "stammers": ("plain", lambda q: ['<tool_call>{"name": </tool_call>'], -1.9),
    # -1.9 + p
    "calls what isn't there": ("plain", lambda q: [*found(q), as_text("send_email", {"to": "you"})], -1.7),
    # -1.8 + p
    "searches for nothing": ("plain", lambda q: [as_text("search_inbox", {"keywords": []})], -1.7),
    "searches for no day": (
        "plain",
        lambda q: [*found(q), as_text("search_inbox", {"keywords": ["a"], "after": "Monday"})],
        -1.6,
    ),
    "asks for more than there is": (
        "plain",
        lambda q: [as_text("search_inbox", {"keywords": ["a"], "folder": "sent"})],
        -1.7,
    ),
    "names a mail by number": ("plain", lambda q: [MISSED, as_text("read_email", {"message_id": 5})], -1.8),
    "answers without mails": ("plain", lambda q: [as_text("return_final_answer", {"answer": "yes"})], -1.7),
    # S1 and S2: 1 + 0.3 + 0.1/2 + 0.1 (1 - 5/10)
    "right from two": ("hop", lambda q: [*found(q), *read(q), right(q)], 1.4),
    # 1 + 0 + 0.1/1 + 0.09: one of two is not the source
    "right from one of two": ("hop", lambda q: [said(q.answer, q.message_ids[1])], 1.19),
    # 0 + p, p = 0.1 no miss: neither found nor read both
    "stops half way": ("hop", lambda q: [found(q)[0], read(q)[0], said(DONT_KNOW)], 0.1),
    # 1 + 0.3 + 0 + 0.1 (1 - 2/10)
    "right that it can't be known": ("missing", lambda q: [*found(q), said(DONT_KNOW)], 1.38),
    # 1 + 0 + 0.1/1 + 0.09
    "right, with a mail for nothing": ("missing", lambda q: [said(DONT_KNOW, "N")], 1.19),
    # -1 + p, p = 0.1 no miss
    "knows what can't be known": ("missing", lambda q: [said("yes")], -0.9),
}


def task_of(environment: Environment, kind: str) -> tuple[Task, Question]:
    """The first training task of a kind."""
    sources = {"plain": 1, "hop": 2, "missing": 0}[kind]
    for task in environment.tasks("train"):
        question = Question.model_validate(task.data)
        if len(question.message_ids) == sources:
            return task, question
    raise AssertionError(kind)
