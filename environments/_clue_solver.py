"""Proves what clues leave open, with a SAT solver.

Every suspect, weapon, room and motive belongs to a visit at one of a day's times, and so does the murderer, one of the
suspects. A clue is a relation between the times of two or three such items. The propositions are "this item belongs
to that time"; a clue forbids the combinations of times for which its relation does not hold. That no other answer than
the true one is possible is then a proof of unsatisfiability, and the clues it used are all that is needed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple

from pysat.solvers import Solver  # type: ignore[import-untyped]

SOLVER = "minisat22"
MURDERER = "murderer"
RELATIONS: dict[str, Callable[..., bool]] = {
    "is": lambda a, b: a == b,
    "is not": lambda a, b: a != b,
    "is either": lambda a, b, c: a in (b, c),
    "came before": lambda a, b: a < b,
    "came right before": lambda a, b: a + 1 == b,
}

Categories = Mapping[str, Sequence[str]]
"""Items by category; those of `time` in order. No name is in two categories."""
Times = Mapping[str, int]
"""Index of the time that each item belongs to."""


class Clue(NamedTuple):
    """A relation and what it relates."""

    relation: str
    items: tuple[str, ...]

    def holds(self, times: Times) -> bool:
        """Whether it is true."""
        return RELATIONS[self.relation](*(times[item] for item in self.items))


def solution(categories: Categories, clues: Iterable[Clue]) -> dict[str, int] | None:
    """Times that fit the clues, where there are any."""
    propositions = _propositions(categories)
    clauses = chain(_rules(categories, propositions), *(_clauses(clue, propositions) for clue in clues))
    with Solver(SOLVER, bootstrap_with=clauses) as solver:
        if not solver.solve():
            return None
        true = set(solver.get_model())
    return {item: next(i for i, number in enumerate(row) if number in true) for item, row in propositions.items()}


def answer(categories: Categories, times: Times) -> dict[str, str]:
    """The murderer's item of each category."""
    return {
        category: next(item for item in items if times[item] == times[MURDERER])
        for category, items in categories.items()
    }


def needed(categories: Categories, clues: Iterable[Clue], times: Times) -> list[Clue]:
    """Takes true clues, which must not run out, until one answer is left; then leaves out what can be spared."""
    propositions = _propositions(categories)
    accused = [MURDERER, *answer(categories, times).values()]
    another_answer = [-propositions[item][times[MURDERER]] for item in accused]
    switches: dict[int, Clue] = {}  # A proposition more for each clue: where it is assumed, the clue counts.
    with Solver(SOLVER, bootstrap_with=[*_rules(categories, propositions), another_answer]) as solver:
        for switch, clue in enumerate(clues, start=solver.nof_vars() + 1):
            switches[switch] = clue
            solver.append_formula([-switch, *clause] for clause in _clauses(clue, propositions))
            if not solver.solve(assumptions=list(switches)):
                break
        proof: list[int] = solver.get_core()
        for switch in proof.copy():
            without = [other for other in proof if other != switch]
            if not solver.solve(assumptions=without):
                proof = without
    return [switches[switch] for switch in proof]


def _propositions(categories: Categories) -> dict[str, list[int]]:
    """Numbers from 1: that an item belongs to the first time, the second, …"""
    items, times = [MURDERER, *chain(*categories.values())], len(categories["time"])
    return {item: list(range(i * times + 1, (i + 1) * times + 1)) for i, item in enumerate(items)}


def _rules(categories: Categories, propositions: Mapping[str, list[int]]) -> Iterator[list[int]]:
    yield from ([propositions[time][i]] for i, time in enumerate(categories["time"]))
    for row in propositions.values():
        yield row
        yield from ([-a, -b] for a, b in combinations(row, 2))
    for items in categories.values():
        for column in zip(*(propositions[item] for item in items), strict=True):
            yield from ([-a, -b] for a, b in combinations(column, 2))


def _clauses(clue: Clue, propositions: Mapping[str, list[int]]) -> Iterator[list[int]]:
    rows = [propositions[item] for item in clue.items]
    for times in product(range(len(rows[0])), repeat=len(rows)):
        if not RELATIONS[clue.relation](*times):
            yield [-row[time] for row, time in zip(rows, times, strict=True)]
