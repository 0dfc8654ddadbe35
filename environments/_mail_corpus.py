"""A company's mails, made up from a seed, and questions about them whose answers are known.

Each story is about one project, whose name no other has: a thread of a few mails among a few people, who state facts of
it between the small talk. What is asked about it is one of four kinds: a `plain` fact, one that a later mail `changed`,
one that takes a `hop` from the project's supplier to a mail about that supplier in another thread, or one that is
`missing` from all mails. All mails of a story are in the inbox of the person who is asked about it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cache
from itertools import product
from random import Random
from typing import Literal, NamedTuple

from environments._mail_store import Mail
from environments._mail_words import (
    ADJECTIVES,
    FILLERS,
    FIRST_NAMES,
    LAST_NAMES,
    NOUNS,
    PLACES,
    TOPICS,
    TRADES,
)

Kind = Literal["plain", "changed", "hop", "missing"]
KINDS: tuple[Kind, ...] = ("plain", "changed", "hop", "missing")
WEIGHTS = (4, 2, 3, 2)
FIRST_DAY = datetime(2024, 1, 1, 8)
DAYS = 700
TODAY = date(2026, 1, 5)
"""After the last mail; it is when all questions are asked."""
DOMAIN = "fernhill.example"


class Person(NamedTuple):
    """Somebody of the company."""

    first: str
    last: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def address(self) -> str:
        return f"{self.first}.{self.last}@{DOMAIN}".lower()


@dataclass(frozen=True)
class Attribute:
    """Something that a mail can say about a project or a supplier, and a question can ask."""

    says: str
    asks: str
    value: Callable[[Random], str]


@dataclass(frozen=True)
class Asked:
    """A question about a story."""

    question: str
    answer: str | None
    """None where no mail tells."""
    person: Person
    kind: Kind
    sources: tuple[Mail, ...]
    searches: tuple[str, ...]
    """What to look for to find the sources, one after the other."""


@dataclass(frozen=True)
class Corpus:
    """Mails and what can be asked about them."""

    people: list[Person]
    mails: list[Mail]
    questions: list[Asked]


def _amount(random: Random) -> str:
    return f"${random.randrange(20, 2000) * 50:,}"


def _number(random: Random) -> str:
    return str(random.randrange(12, 900))


def _reference(random: Random) -> str:
    return f"{random.choice('ABCDEFG')}{random.choice('HKLMNP')}-{random.randrange(1000, 10000)}"


def _phone(random: Random) -> str:
    return f"555-{random.randrange(10000):04}"


def _account(random: Random) -> str:
    return str(random.randrange(100000, 1000000))


def _day(random: Random) -> str:
    return (TODAY + timedelta(days=random.randrange(400))).isoformat()


def _room(random: Random) -> str:
    return f"{random.choice(('Elm', 'Oak', 'Birch', 'Maple'))} {random.randrange(1, 40)}"


def _name(random: Random) -> str:
    return f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"


PROJECT = (
    Attribute("From now on we meet about {} in room {}.", "In which room do we meet about {}?", _room),
    Attribute("The budget for {} is {}.", "What is the budget for {}?", _amount),
    Attribute("{} has to be delivered by {}.", "By which date (YYYY-MM-DD) does {} have to be delivered?", _day),
    Attribute("On the customer's side, {} is led by {}.", "Who leads {} on the customer's side?", _name),
    Attribute("{} will be set up in {}.", "In which town will {} be set up?", lambda random: random.choice(PLACES)),
    Attribute("For {} we ship {} pallets.", "How many pallets do we ship for {}?", _number),
    Attribute("On all papers for {} please quote {}.", "What is to be quoted on all papers for {}?", _reference),
)
SUPPLIER = (
    Attribute("The phone number of {} is {}.", "What is the phone number of the supplier for {}?", _phone),
    Attribute("Our account with {} is {}.", "What is the number of our account with the supplier for {}?", _account),
    Attribute("At {} the one to ask is {}.", "Whom do we ask at the supplier for {}?", _name),
)
SUPPLIES = "The supplier for {} is {}."


def make_corpus(seed: int, count: int) -> Corpus:
    """At least `count` mails, at most some ten more: always the same for the same seed."""
    random = Random(f"mails/{seed}")
    people = random.sample([Person(*names) for names in product(FIRST_NAMES, LAST_NAMES)], max(8, count // 60))
    projects = _shuffled(product(ADJECTIVES, NOUNS), random)
    suppliers = _shuffled(product(LAST_NAMES, TRADES), random)
    writer, questions = _Writer(random, people), list[Asked]()
    while len(writer.mails) < count:
        [kind] = random.choices(KINDS, WEIGHTS)
        questions.append(_story(writer, next(projects)).tell(kind, suppliers))
        if random.random() < 0.3:
            writer.thread(random.choice(TOPICS), random.sample(people, min(6, len(people))), [[]])
    return Corpus(people, writer.mails, questions)


class _Writer:
    """Writes threads into one pile of mails."""

    def __init__(self, random: Random, people: list[Person]) -> None:
        self.random, self.people = random, people
        self.mails: list[Mail] = []
        self._names: set[str] = set()

    def thread(self, subject: str, among: list[Person], facts: list[list[str]]) -> list[Mail]:
        """A mail for each list of facts, from one to all others, hours to days apart."""
        at = FIRST_DAY + timedelta(minutes=self.random.randrange(DAYS * 24 * 60))
        written: list[Mail] = []
        for told in facts:
            sender, *others = self.random.sample(among, len(among))
            title = f"Re: {subject}" if written else subject
            addresses = tuple(person.address for person in others)
            body = self._body(sender, others[0], told)
            sent_at = at.isoformat(timespec="minutes")
            written.append(Mail(self._new_name(), sent_at, sender.address, addresses, title, body))
            at += timedelta(minutes=self.random.randrange(20, 3000))
        self.mails += written
        return written

    def _body(self, sender: Person, to: Person, told: list[str]) -> str:
        sentences = [*self.random.sample(FILLERS, self.random.randint(1, 3)), *told]
        self.random.shuffle(sentences)
        return f"Hi {to.first},\n{' '.join(sentences)}\n{sender.first}"

    def _new_name(self) -> str:
        while (name := f"{self.random.getrandbits(24):06x}") in self._names:
            pass
        self._names.add(name)
        return name


@dataclass(frozen=True)
class _Story:
    """One project's mails, about to be written."""

    writer: _Writer
    among: list[Person]
    topic: str
    project: str
    attribute: Attribute
    """Of the project: what is asked, unless the supplier is."""
    others: list[str]
    """Facts that nobody asks for."""

    def tell(self, kind: Kind, suppliers: Iterator[str]) -> Asked:
        """Writes the mails."""
        if kind == "hop":
            return self._hop(next(suppliers))
        return {"plain": self._plain, "changed": self._changed, "missing": self._missing}[kind]()

    def _plain(self) -> Asked:
        fact, value = self._says(self.attribute, self.project)
        mails = self._thread(self._spread([fact, *self.others]))
        return self._asked("plain", self.attribute, value, _telling(mails, fact), (self.project,))

    def _changed(self) -> Asked:
        fact, was = self._says(self.attribute, self.project)
        correction, now = fact, was
        while now == was:
            correction, now = self._says(self.attribute, self.project)
        told = [*self._spread([fact, *self.others]), [], [f"Sorry, what we said before no longer holds. {correction}"]]
        mails = self._thread(told)
        return self._asked("changed", self.attribute, now, (mails[-1],), (self.project,))

    def _missing(self) -> Asked:
        self._thread(self._spread(self.others))
        return self._asked("missing", self.attribute, None, (), (self.project,))

    def _hop(self, supplier: str) -> Asked:
        supplies = SUPPLIES.format(self.project, supplier)
        mails = self._thread(self._spread([supplies, *self.others]))
        attribute = self.writer.random.choice(SUPPLIER)
        fact, value = self._says(attribute, supplier)
        strangers = [person for person in self.writer.people if person not in self.among]
        among = [self.among[0], *self.writer.random.sample(strangers, 2)]
        sources = _telling(mails, supplies) + _telling(self.writer.thread(supplier, among, self._spread([fact])), fact)
        return self._asked("hop", attribute, value, sources, (self.project, supplier))

    def _thread(self, facts: list[list[str]]) -> list[Mail]:
        return self.writer.thread(self.topic, self.among, facts)

    def _says(self, attribute: Attribute, of: str) -> tuple[str, str]:
        """A sentence, and the value in it."""
        value = attribute.value(self.writer.random)
        return attribute.says.format(of, value), value

    def _spread(self, facts: list[str]) -> list[list[str]]:
        """The facts over some mails, of which some may tell none."""
        random = self.writer.random
        mails: list[list[str]] = [[] for _ in range(random.randint(2, 4))]
        for fact in facts:
            random.choice(mails).append(fact)
        return mails

    def _asked(
        self, kind: Kind, attribute: Attribute, answer: str | None, sources: tuple[Mail, ...], searches: tuple[str, ...]
    ) -> Asked:
        return Asked(attribute.asks.format(self.project), answer, self.among[0], kind, sources, searches)


def _story(writer: _Writer, project: str) -> _Story:
    random = writer.random
    asked, *others = random.sample(PROJECT, 4)
    told = [other.says.format(project, other.value(random)) for other in others]
    among = random.sample(writer.people, random.randint(3, 4))
    return _Story(writer, among, f"{project}: {random.choice(TOPICS)}", project, asked, told)


def _telling(mails: list[Mail], fact: str) -> tuple[Mail, ...]:
    return tuple(mail for mail in mails if fact in mail.body)


def _shuffled(pairs: Iterable[tuple[str, str]], random: Random) -> Iterator[str]:
    names = [" ".join(pair) for pair in pairs]
    random.shuffle(names)
    return iter(names)


corpus = cache(make_corpus)
"""Made once a process."""
