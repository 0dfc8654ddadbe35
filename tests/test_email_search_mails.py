"""The mails: made up so that they tell what is asked, searched as the tools say, and Enron's behind the same table."""

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from environment_fixtures import in_turn, play
from mail_fixtures import said

from environments import UnknownEnvironment, load
from environments._mail_corpus import PROJECT, SUPPLIER, SUPPLIES, Asked, make_corpus
from environments._mail_enron import enron_store
from environments._mail_store import Mail, MailStore
from environments._tool_calls import as_text

CORPUS = make_corpus(seed=0, count=3000)


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


def test_a_newer_file_is_read_anew(tmp_path: Path) -> None:
    assert len(enron_store(write_enron(tmp_path))) == 2
    file = write_enron(tmp_path, mails=(ENRON.format(name=3, subject="", body=""),))
    later = file.stat().st_mtime + 10
    os.utime(file, (later, later))
    store = enron_store(file)
    assert len(store) == 1
    assert store.read("ann@enron.com", "<3@thyme>")


def test_mails_and_questions_go_together(tmp_path: Path) -> None:
    with pytest.raises(UnknownEnvironment, match="`enron` and `questions` go together"):
        load("email_search", enron=tmp_path / "emails.csv")
    environment = load("email_search", enron=tmp_path / "no.csv", questions=write_question(tmp_path, QUESTION))
    with pytest.raises(UnknownEnvironment, match=r"can't make .*no.csv.sqlite from .*no.csv: No such file"):
        environment.tasks("test")
