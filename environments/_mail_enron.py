"""The public Enron mails behind the same table: `emails.csv` with the columns `file` and `message`, a raw mail each.

Half a million mails take minutes to read, so that is done once: the table is a file beside the CSV, by the name of
`emails.csv.sqlite`, which counts as long as it is newer than the CSV. It appears whole or not at all, whoever else is
making it.
"""

import csv
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from email.errors import MessageError
from email.message import Message
from email.parser import Parser
from email.utils import getaddresses, parsedate_to_datetime
from pathlib import Path

from environments._mail_store import Mail, MailStore, fill
from environments.base import UnknownEnvironment

COLUMNS = ["file", "message"]
LONGEST_FIELD = 1 << 30
ADDRESSED = ("To", "Cc", "Bcc")


def enron_store(file: Path) -> MailStore:
    """The mails of `file`. Raises `UnknownEnvironment` where it can't be read, or no table be put beside it."""
    table = file.with_name(f"{file.name}.sqlite")
    try:
        if not table.exists() or table.stat().st_mtime < file.stat().st_mtime:
            _make(file, table)
    except OSError as error:
        raise UnknownEnvironment(f"can't make {table} from {file}: {error.strerror} ({error.filename})") from None
    return MailStore.in_file(table)


def read_enron(file: Path) -> Iterator[Mail]:
    """Every mail. Raises `UnknownEnvironment`, which names the row that is none."""
    csv.field_size_limit(LONGEST_FIELD)
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = csv.reader(lines)
        if (header := next(rows, None)) != COLUMNS:
            raise UnknownEnvironment(f"{file} must have the columns {', '.join(COLUMNS)}; it has {header}")
        for number, row in enumerate(rows, start=1):
            try:
                _, text = row
                yield _mail(Parser().parsestr(text))
            except (ValueError, TypeError, MessageError) as error:
                raise UnknownEnvironment(f"{file}: mail {number} can't be read: {error}") from None


def _mail(message: Message) -> Mail:
    name = message["Message-ID"]
    if not name:
        raise ValueError("it has no Message-ID")
    return Mail(
        message_id=name.strip(),
        sent_at=parsedate_to_datetime(message["Date"]).replace(tzinfo=None).isoformat(timespec="minutes"),
        sender=next(iter(_addresses(message, ["From"])), ""),
        recipients=_addresses(message, ADDRESSED),
        subject=" ".join(str(message["Subject"] or "").split()),
        body=str(next(part for part in message.walk() if not part.is_multipart()).get_payload()).strip(),
    )


def _addresses(message: Message, headers: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    given = [str(value) for header in headers for value in message.get_all(header, [])]
    return tuple(dict.fromkeys(address.lower() for _, address in getaddresses(given) if address))


def _make(file: Path, table: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=table.parent, prefix=f".{table.name}.")
    os.close(descriptor)
    try:
        connection = sqlite3.connect(name)
        fill(connection, read_enron(file)).close()
        Path(name).replace(table)
    except BaseException:  # Whatever it was, it goes on; no half table is left.
        Path(name).unlink()
        raise
