"""Mails in SQLite with a full-text index: what the tools of an e-mail agent search and read.

A store lies in memory or in a file; either way it is only read once it is made. SQLite serializes what several threads
ask of one connection, so that any number of rollouts share a store.
"""

import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Self

SCHEMA = """
CREATE TABLE mails (
    number INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL UNIQUE,
    sent_at TEXT NOT NULL,
    sender TEXT NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE recipients (number INTEGER NOT NULL, address TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(subject, body, content='mails', content_rowid='number', tokenize='porter');
"""
INDEX = """
CREATE INDEX recipient ON recipients (number, address);
INSERT INTO words(words) VALUES('rebuild');
"""
SEARCH = """
SELECT message_id, sent_at, sender, mails.subject, snippet(words, 1, '', '', '…', 16)
FROM words JOIN mails ON mails.number = words.rowid
WHERE words MATCH :words AND {conditions} ORDER BY rank, sent_at DESC, message_id LIMIT :most
"""
RECEIVED = "EXISTS (SELECT 1 FROM recipients WHERE recipients.number = mails.number AND address = :{address})"
CONDITIONS = {
    "inbox": f"(sender = :inbox OR {RECEIVED.format(address='inbox')})",
    "sent_from": "sender = :sent_from",
    "sent_to": RECEIVED.format(address="sent_to"),
    "after": "sent_at >= :after",
    "before": "sent_at < :before",
}


@dataclass(frozen=True)
class Mail:
    """One mail. Addresses are in small letters."""

    message_id: str
    sent_at: str
    """ISO 8601, without a zone: `2025-03-04T09:30`."""
    sender: str
    recipients: tuple[str, ...]
    subject: str
    body: str


@dataclass(frozen=True)
class Hit:
    """A mail that a search found, in brief."""

    message_id: str
    sent_at: str
    sender: str
    subject: str
    snippet: str


class MailStore:
    """Mails to search and to read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def in_memory(cls, mails: Iterable[Mail]) -> Self:
        """A store of this process."""
        return cls(fill(sqlite3.connect(":memory:", check_same_thread=False), mails))

    @classmethod
    def in_file(cls, file: Path) -> Self:
        """A store that `fill` has made; it is not written to, whoever else has it open."""
        return cls(sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False))

    def search(
        self,
        inbox: str,
        keywords: Sequence[str],
        most: int,
        sent_from: str | None = None,
        sent_to: str | None = None,
        after: date | None = None,
        before: date | None = None,
    ) -> list[Hit]:
        """At most so many mails that `inbox` sent or received and that hold all keywords, the best fitting first.

        Words are compared by their stem. `after` is the first day that counts, `before` the first that doesn't.
        """
        given = {
            "inbox": inbox.lower(),
            "sent_from": sent_from and _text(sent_from).lower(),
            "sent_to": sent_to and _text(sent_to).lower(),
            "after": after and after.isoformat(),
            "before": before and before.isoformat(),
        }
        conditions = " AND ".join(CONDITIONS[name] for name, value in given.items() if value)
        parameters = {"words": _quoted(keywords), "most": most, **given}
        return [Hit(*row) for row in self._connection.execute(SEARCH.format(conditions=conditions), parameters)]

    def read(self, inbox: str, message_id: str) -> Mail | None:
        """The mail of that name, where `inbox` sent or received it."""
        found = self._one(f"SELECT * FROM mails WHERE message_id = :id AND {CONDITIONS['inbox']}", inbox, message_id)
        if not found:
            return None
        number, *columns = found
        rows = self._connection.execute("SELECT address FROM recipients WHERE number = ? ORDER BY rowid", (number,))
        name, sent_at, sender, subject, body = columns
        return Mail(name, sent_at, sender, tuple(address for (address,) in rows), subject, body)

    def __len__(self) -> int:
        [count] = self._connection.execute("SELECT count(*) FROM mails").fetchone()
        return int(count)

    def _one(self, query: str, inbox: str, message_id: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(
            query, {"id": _text(message_id), "inbox": inbox.lower()}
        ).fetchone()
        return row


def fill(connection: sqlite3.Connection, mails: Iterable[Mail]) -> sqlite3.Connection:
    """Makes the tables and puts the mails in; of mails with one name the first counts."""
    connection.executescript(SCHEMA)
    insert = "INSERT OR IGNORE INTO mails VALUES (NULL, ?, ?, ?, ?, ?)"
    for mail in mails:
        row = (mail.message_id, mail.sent_at, mail.sender, mail.subject, mail.body)
        cursor = connection.execute(insert, row)
        if cursor.rowcount:
            addresses = ((cursor.lastrowid, address) for address in dict.fromkeys(mail.recipients))
            connection.executemany("INSERT INTO recipients VALUES (?, ?)", addresses)
    connection.executescript(INDEX)
    connection.commit()
    return connection


def _quoted(keywords: Sequence[str]) -> str:
    """Nothing in a keyword is an operator of the query language."""
    return " ".join(f'"{word}"' for keyword in keywords for word in re.findall(r"[^\W_]+", keyword)) or '""'


def _text(given: str) -> str:
    """What SQLite can hold: half a surrogate pair, which JSON can, becomes a question mark."""
    return given.encode("utf-8", "replace").decode()
