"""Makes the puzzles of `temporal_clue`, writes them down, and reads them back.

A puzzle is a day drawn by chance, and true clues about it, drawn one by one until the solver proves that there is
one answer; of these only those stay that the proof needs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from environments._clue_solver import MURDERER, RELATIONS, Clue, answer, needed

NAMES = {
    "suspect": ("Ada", "Bruno", "Clara", "Dexter", "Edith", "Felix", "Greta", "Hugo"),
    "weapon": ("rope", "dagger", "wrench", "poison", "pistol", "poker", "razor", "scarf"),
    "room": ("library", "kitchen", "attic", "cellar", "parlour", "study", "garden", "hall"),
    "time": tuple(f"{hour}:00" for hour in range(14, 24)),
    "motive": ("envy", "greed", "revenge", "fear", "love", "pride", "debt", "ambition"),
}
PHRASES = {
    "suspect": "{}",
    "weapon": "the one with the {}",
    "room": "the one in the {}",
    "time": "the one at {}",
    "motive": "the one moved by {}",
    MURDERER: "the {}",
}
CATEGORY = {name: category for category, names in NAMES.items() for name in names} | {MURDERER: MURDERER}
DIRECT = "is"
SENTENCE = re.compile(r"(.+?) (is not|is either|is|came right before|came before) (.+?)(?: or (.+))?\.")


@dataclass(frozen=True)
class Puzzle:
    """What there is, what is told of it, and what is asked."""

    categories: dict[str, tuple[str, ...]]
    clues: tuple[Clue, ...]
    answer: dict[str, str]
    """The murderer's item of each category."""


def make_puzzle(seed: int, suspects: int, direct: bool) -> Puzzle:
    """Equal arguments, equal puzzle. It has one answer, and no clue can be left out."""
    random = Random(seed)
    categories = {category: _drawn(category, suspects, random) for category in NAMES}
    times = {MURDERER: random.randrange(suspects)}
    for category, items in categories.items():
        order = range(suspects) if category == "time" else random.sample(range(suspects), suspects)
        times |= dict(zip(items, order, strict=True))
    clues = needed(categories, _true_clues(times, direct, random), times)
    random.shuffle(clues)
    return Puzzle(categories, tuple(clues), answer(categories, times))


def write(puzzle: Puzzle) -> str:
    """The puzzle as text."""
    lists = [f"{category}s: {', '.join(items)}" for category, items in puzzle.categories.items()]
    return "\n".join([*lists, *(_sentence(clue) for clue in puzzle.clues)])


def read(text: str) -> tuple[dict[str, tuple[str, ...]], list[Clue]]:
    """The categories and the clues in a puzzle's text."""
    lines = text.split("\n")
    lists = (line.split("s: ") for line in lines[: len(NAMES)])
    categories = {category: tuple(items.split(", ")) for category, items in lists}
    return categories, [_read_clue(line) for line in lines[len(NAMES) :]]


def _drawn(category: str, count: int, random: Random) -> tuple[str, ...]:
    names = NAMES[category]
    if category == "time":
        first = random.randrange(len(names) - count + 1)
        return names[first : first + count]
    return tuple(sorted(random.sample(names, count)))


def _true_clues(times: dict[str, int], direct: bool, random: Random) -> Iterator[Clue]:
    """Endless; all relations come equally often."""
    relations, items = [relation for relation in RELATIONS if direct or relation != DIRECT], list(times)
    while True:
        relation = random.choice(relations)
        count = 3 if relation == "is either" else 2
        while True:
            clue = Clue(relation, tuple(random.sample(items, count)))
            if clue.holds(times) and _says_something(clue, times):
                break
        yield clue


def _says_something(clue: Clue, times: dict[str, int]) -> bool:
    first, *others = (CATEGORY[item] for item in clue.items)
    if clue.relation.startswith("came"):
        return not first == others[0] == "time"
    if clue.relation == DIRECT and MURDERER in (first, *others):
        return False  # That would be the answer.
    return first not in others and len({times[item] for item in clue.items[1:]}) == len(others)


def _sentence(clue: Clue) -> str:
    first, *others = (PHRASES[CATEGORY[item]].format(item) for item in clue.items)
    return f"{first[0].upper()}{first[1:]} {clue.relation} {' or '.join(others)}."


def _read_clue(sentence: str) -> Clue:
    found = SENTENCE.fullmatch(sentence)
    if not found:
        raise ValueError(f"no clue: {sentence}")
    first, relation, *others = found.groups()
    return Clue(relation, tuple(_item(phrase) for phrase in (first, *others) if phrase))


def _item(phrase: str) -> str:
    return phrase.split()[-1]
