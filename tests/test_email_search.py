"""E-mail search: rewards by hand, mails that hold the answers that are said to be in them, Enron's mails, the judge."""

import asyncio
import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import openai
import pytest
from environment_fixtures import in_turn, play, played_by
from judge_fixtures import KEY_VARIABLE, JudgeServer, fault, judge
from mail_fixtures import REWARDS, said, task_of

from environments import Result, UnknownEnvironment, load
from environments._mail_attempt import Question, same
from environments._mail_corpus import PROJECT, SUPPLIER, SUPPLIES, Asked, make_corpus
from environments._mail_judge import JudgeFailed
from environments._mail_store import Mail, MailStore
from environments._tool_calls import as_text, listed

__all__ = ["judge"]
CORPUS = make_corpus(seed=0, count=3000)


@pytest.mark.parametrize("case", REWARDS)
def test_an_attempt_is_worth_what_the_formula_says(case: str) -> None:
    kind, replies, reward = REWARDS[case]
    environment = load("email_search")
    task, question = task_of(environment, kind)
    left = replies(question)
    result = play(environment, task, lambda messages: left.pop(0))
    assert result.reward == pytest.approx(reward, abs=1e-9)
    assert not left, "it went on to the end"


def test_calls_written_as_text_are_worth_the_same() -> None:
    environment = load("email_search", tool_calls="text")
    seen: list[Any] = []
    for kind, replies, reward in REWARDS.values():
        task, question = task_of(environment, kind)
        replied = in_turn(replies(question))

        def answer(messages: Any, replied: Callable[[Any], str | None] = replied) -> str | None:
            seen.append(messages[0]["content"])
            return replied(messages)

        assert play(environment, task, answer).reward == pytest.approx(reward, abs=1e-9)
    assert "search_inbox" in seen[0]


def test_of_several_calls_in_a_turn_the_first_is_made() -> None:
    environment = load("email_search")
    task, question = task_of(environment, "plain")
    asked: list[Any] = []

    def twice(messages: Any) -> str:
        asked.append(list(messages))
        search = as_text("search_inbox", {"keywords": question.searches[0].split()})
        return search + said("yes") if len(asked) == 1 else said(question.answer, *question.message_ids)

    assert play(environment, task, twice).reward == pytest.approx(1.48)
    assert [m["role"] for m in asked[1]] == ["system", "user", "assistant", "tool", "tool"]
    assert question.message_ids[0] in asked[1][3]["content"]
    assert "not done" in asked[1][4]["content"]


def test_what_happened_is_measured() -> None:
    environment = load("email_search", max_turns=4)
    task, question = task_of(environment, "plain")
    result = play(environment, task, in_turn(REWARDS["right after a look"][1](question)))
    assert result.reward == pytest.approx(1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 4))
    assert result.metadata == {"ending": "answered", "answer": question.answer}
    expected = {"turns": 3, "correct": 1, "named": 1, "found_sources": 1, "read_sources": 1, "invalid_reads": 0}
    assert result.metrics | expected == result.metrics


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Elm 4", "elm 4.", True),
        ("$48,500", "48500", True),
        ("The Elm 4", " elm\n4", True),
        ("14:30", "14.30", False),
        ("2026-03-01", "2026 03 01", False),
        ("555-0123", "555-0124", False),
        ("Elm 4", "room Elm 4", False),
        ("12", "1,2", False),
        ("I don't know", "I don\u2019t know!", True),
    ],
)
def test_answers_are_compared_word_for_word(one: str, other: str, equal: bool) -> None:
    assert same(one, other) == same(other, one) == equal


def test_equal_seeds_make_equal_mails() -> None:
    assert make_corpus(0, 3000) == CORPUS
    assert make_corpus(1, 3000).mails != CORPUS.mails
    assert 3000 <= len(CORPUS.mails) < 3015
    assert len({mail.message_id for mail in CORPUS.mails}) == len(CORPUS.mails)
    assert len({asked.question for asked in CORPUS.questions}) == len(CORPUS.questions) > 600


def stating(asked: Asked) -> list[tuple[Mail, str]]:
    """All mails in the inbox that state what is asked, by their time, and the value they state."""
    project, *_ = asked.searches
    [attribute] = [a for a in (*PROJECT, *SUPPLIER) if a.asks.format(project) == asked.question]
    mails = [m for m in CORPUS.mails if asked.person.address in (m.sender, *m.recipients)]
    of = project
    if attribute in SUPPLIER:
        [of] = {found[1] for m in mails if (found := pattern(SUPPLIES, project).search(m.body))}
    told = [(m, found[1]) for m in mails if (found := pattern(attribute.says, of).search(m.body))]
    return sorted(told, key=lambda pair: pair[0].sent_at)


def pattern(says: str, of: str) -> re.Pattern[str]:
    """A sentence about `of`, with a group for its value."""
    before, between, after = (re.escape(part) for part in says.split("{}"))
    return re.compile(f"{before}{re.escape(of)}{between}(.+?){after}(?= |\n)")


def test_the_mails_tell_what_is_asked_and_nothing_else() -> None:
    count = {"plain": 1, "changed": 2, "hop": 1, "missing": 0}
    for asked in CORPUS.questions:
        told = stating(asked)
        assert len(told) == count[asked.kind], asked
        if told:
            assert told[-1] == (asked.sources[-1], asked.answer)
        else:
            assert (asked.answer, asked.sources) == (None, ())
        assert len(asked.sources) == {"hop": 2, "missing": 0}.get(asked.kind, 1)


def test_no_inbox_is_in_both_splits() -> None:
    environment = load("email_search")
    train, test = ({task.data["inbox_address"] for task in environment.tasks(split)} for split in ("train", "test"))
    assert not train & test
    assert (len(train) > 30, len(test) > 10, len(environment.tasks("test"))) == (True, True, 128)


def test_rollouts_that_run_together_do_not_mix() -> None:
    environment = load("email_search")
    [best, *_] = environment.players()

    async def attempt(index: int) -> Result:
        task = environment.tasks("train")[index]
        with played_by(lambda messages: best.act(messages, None)) as policy:  # type: ignore[arg-type]
            return await environment.rollout(task, policy)

    async def together() -> list[Result]:
        return await asyncio.gather(*(attempt(index) for index in range(40)))

    assert asyncio.run(together()) == [asyncio.run(attempt(index)) for index in range(40)]


STORE = MailStore.in_memory(
    [
        Mail("1", "2025-01-01T09:00", "a@x", ("b@x", "c@x"), "Boats", "The boats were painted green."),
        Mail("2", "2025-01-02T09:00", "b@x", ("a@x",), "Re: Boats", "Green is painting it, and AND OR."),
        Mail("3", "2025-01-03T23:59", "c@x", ("a@x", "b@x"), "Café", 'He said "no" (really) to boats'),
        Mail("3", "2025-01-03T23:59", "c@x", ("d@x",), "again", "by the same name"),
    ]
)


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ({"keywords": ["boat"]}, {"1", "2", "3"}),
        ({"keywords": ["paint", "green"]}, {"1", "2"}),
        ({"keywords": ["green boats"]}, {"1", "2"}),
        ({"keywords": ["cafe"]}, {"3"}),
        ({"keywords": ["AND", "OR"]}, {"2"}),
        ({"keywords": ['"no" NEAR(']}, set()),
        ({"keywords": ['"', "*", "body:", "\x00", "\ud800"]}, set()),
        ({"keywords": ["*!"]}, set()),
        ({"keywords": ["boats"], "sent_from": "C@x"}, {"3"}),
        ({"keywords": ["boats"], "sent_to": "c@X"}, {"1"}),
        ({"keywords": ["boats"], "sent_to": "\ud800"}, set()),
        ({"keywords": ["boats"], "after": date(2025, 1, 2)}, {"2", "3"}),
        ({"keywords": ["boats"], "after": date(2025, 1, 2), "before": date(2025, 1, 3)}, {"2"}),
        ({"keywords": ["boats"], "inbox": "c@x"}, {"1", "3"}),
        ({"keywords": ["boats"], "inbox": "d@x"}, set()),
    ],
)
def test_a_search_finds_what_fits(search: dict[str, Any], found: set[str]) -> None:
    assert {hit.message_id for hit in STORE.search(**{"inbox": "a@x", "most": 10, **search})} == found


def test_a_search_gives_no_more_than_asked_for_and_a_mail_is_its_readers() -> None:
    assert len(STORE) == 3
    assert len(STORE.search("a@x", ["boats"], most=2)) == 2
    mail = STORE.read("B@x", "1")
    assert mail and (mail.recipients, mail.subject) == (("b@x", "c@x"), "Boats")
    assert STORE.read("d@x", "1") is None
    assert STORE.read("a@x", "\ud800") is None


ENRON = """\
Message-ID: <{name}@thyme>
Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)
From: phillip.allen@enron.com
To: Tim.Belden@enron.com, john@enron.com
Cc: "Ann, Z." <ann@enron.com>
Subject: {subject}
Mime-Version: 1.0
Content-Type: text/plain; charset=us-ascii
X-Folder: \\Phillip_Allen_Jan2002_1\\Sent Mail

{body}
"""
QUESTION = {
    "id": 7,
    "split": "test",
    "question": "What does the forecast cost?",
    "answer": "$200",
    "message_ids": ["<2@thyme>"],
    "inbox_address": "tim.belden@enron.com",
    "query_date": "2001-06-01",
    "how_realistic": 0.9,
}


@pytest.fixture
def enron(tmp_path: Path) -> dict[str, Any]:
    """A file in the form of the public one, and a question: an environment's options."""
    return {"enron": write_enron(tmp_path), "questions": write_question(tmp_path, QUESTION)}


def write_enron(folder: Path, header: str = '"file","message"', mails: tuple[str, ...] = ()) -> Path:
    mails = mails or (
        ENRON.format(name=1, subject="Forecast", body='Here is our "forecast"\nfor May.'),
        ENRON.format(name=2, subject="Re: Forecast", body="The forecast costs $200."),
    )
    rows = [f'"allen-p/sent/{i}.","{mail.replace(chr(34), chr(34) * 2)}"' for i, mail in enumerate(mails)]
    (folder / "emails.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder / "emails.csv"


def write_question(folder: Path, question: dict[str, Any]) -> Path:
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return folder / "questions.jsonl"


def test_enrons_mails_are_searched_like_others(enron: dict[str, Any]) -> None:
    environment = load("email_search", **enron)
    [task] = environment.tasks("test")
    assert (task.id, environment.tasks("train")) == ("7", [])
    calls = [
        as_text("search_inbox", {"keywords": ["forecasts"], "sent_to": "ann@enron.com", "after": "2001-05-14"}),
        as_text("read_email", {"message_id": "<2@thyme>"}),
        said("200", "<2@thyme>"),
    ]
    assert play(environment, task, in_turn(calls)).reward == pytest.approx(1.47)
    table = enron["enron"].with_name("emails.csv.sqlite")
    [mail] = [MailStore.in_file(table).read("ann@enron.com", "<1@thyme>")]
    assert mail == Mail(
        "<1@thyme>",
        "2001-05-14T16:39",
        "phillip.allen@enron.com",
        ("tim.belden@enron.com", "john@enron.com", "ann@enron.com"),
        "Forecast",
        'Here is our "forecast"\nfor May.',
    )
    assert [file.name for file in sorted(table.parent.iterdir())] == ["emails.csv", table.name, "questions.jsonl"]


@pytest.mark.parametrize(
    ("header", "mail", "question", "message"),
    [
        ('"path","text"', None, {}, r"emails.csv must have the columns file, message; it has \['path', 'text'\]"),
        (None, "Subject: hi\n\nhi", {}, "emails.csv: mail 1 can't be read: it has no Message-ID"),
        (None, "Message-ID: <1>\nDate: soon\n\nhi", {}, "emails.csv: mail 1 can't be read: .*soon"),
        (None, None, {"message_ids": ["<3@thyme>"]}, "the question '7' needs the mail <3@thyme>, which is not in"),
        (None, None, {"inbox_address": "kenneth@enron.com"}, "not in the inbox of kenneth@enron.com"),
        (None, None, {"query_date": "soon"}, r"questions.jsonl: the question '7', query_date: .*valid date"),
    ],
)
def test_files_that_are_not_as_they_should_be_are_refused(
    tmp_path: Path, header: str | None, mail: str | None, question: dict[str, Any], message: str
) -> None:
    file = write_enron(tmp_path, header or '"file","message"', (mail,) if mail else ())
    environment = load("email_search", enron=file, questions=write_question(tmp_path, QUESTION | question))
    with pytest.raises(UnknownEnvironment, match=message) as error:
        environment.tasks("test")
    assert "\n" not in str(error.value)
    assert {file.suffix for file in tmp_path.iterdir()} <= {".csv", ".jsonl", ".sqlite"}, "nothing half-made is left"


def test_mails_and_questions_go_together(tmp_path: Path) -> None:
    with pytest.raises(UnknownEnvironment, match="`enron` and `questions` go together"):
        load("email_search", enron=tmp_path / "emails.csv")
    environment = load("email_search", enron=tmp_path / "no.csv", questions=write_question(tmp_path, QUESTION))
    with pytest.raises(UnknownEnvironment, match=r"can't make .*no.csv.sqlite from .*no.csv: No such file"):
        environment.tasks("test")


def judged(judge: JudgeServer, answer: str, **options: Any) -> Result:
    """An answer in its first turn, with its source."""
    settings = {"model": "judge", "base_url": judge.url, "key_variable": KEY_VARIABLE, "retries": 1, **options}
    environment = load("email_search", judge=settings)
    task, question = task_of(environment, "plain")
    return play(environment, task, in_turn([said(answer or question.answer, *question.message_ids)]))


def test_a_judge_is_asked_where_words_differ(judge: JudgeServer) -> None:
    judge.reply = lambda request, number: "True."
    assert judged(judge, "It is what we said.").reward == pytest.approx(1.49)
    [request] = judge.requests
    question = task_of(load("email_search"), "plain")[1]
    assert f"Question: {question.question}\nRight answer: {question.answer}\n" in request["messages"][1]["content"]
    judge.reply = lambda request, number: "false"
    assert judged(judge, "It is not.").reward == pytest.approx(-0.8)
    assert judged(judge, "I don't know").reward == pytest.approx(0.1)
    assert judged(judge, "").reward == pytest.approx(1.49)
    assert len(judge.requests) == 2, "what matches word for word, and no answer, ask nobody"


def test_a_judge_that_mumbles_is_asked_again(judge: JudgeServer) -> None:
    judge.reply = lambda request, number: "true" if number == 2 else "Well, it depends."
    assert judged(judge, "yes").reward == pytest.approx(1.49)
    assert len(judge.requests) == 3
    judge.reply = lambda request, number: "Well, it depends."
    with pytest.raises(JudgeFailed, match=r"asked 3 times for true or false, and said 'Well, it depends\.'"):
        judged(judge, "yes")
    assert len(judge.requests) == 6


def test_a_judge_that_fails_makes_no_answer_wrong(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    judge.reply = lambda request, number: fault(429, "slowly", **{"retry-after-ms": "1"}) if number == 0 else "true"
    assert judged(judge, "yes").reward == pytest.approx(1.49)
    judge.reply = lambda request, number: fault(500, "broken", **{"retry-after-ms": "1"})
    with pytest.raises(openai.InternalServerError, match="broken"):
        judged(judge, "yes")
    assert len(judge.requests) == 2 + 2
    judge.delay = 0.15
    with pytest.raises(openai.APITimeoutError):
        judged(judge, "yes", timeout=0.05, retries=0)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(JudgeFailed, match=f"{KEY_VARIABLE}, the judge's key_variable, is not set"):
        judged(judge, "yes")


def test_a_long_mail_is_cut_and_says_so() -> None:
    store = MailStore.in_memory([Mail("1", "2025-01-01T09:00", "a@x", (), "Long", "word " * 2000)])
    environment = load("email_search")
    attempt = environment.attempt(environment.tasks("train")[0])  # type: ignore[attr-defined]
    attempt.store, attempt.question = store, Question(question="?", inbox_address="a@x", query_date=date(2025, 1, 1))
    read = json.loads(attempt.call("read_email", {"message_id": "1"}))
    assert read["body"].endswith("(5000 characters more)")
    assert len(read["body"]) < 5050


def test_the_tools_are_described_in_few_words() -> None:
    from environments._mail_attempt import openai_tools

    assert len(listed(openai_tools())) < 1500
