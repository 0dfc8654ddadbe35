"""Codenames for one team, whose two seats, spymaster and guesser, are played by the same policy.

Asked: the spymaster sees whose each word is and replies with a clue, `animal, 2`: one word of letters and hyphens that
contains no word still on the board, and for how many words it is, 1 to 9. The guesser sees the words alone and replies
with one of them, so often and once more, or from the second time on with `end_turn`. A word that is not the team's own
ends the turn; after each turn a rival team covers one of its words. The game ends when a team has none left, with the
assassin, or at once with a reply that breaks these rules.

Rewarded, as in OpenPipe ART's example (examples/codenames of its notebooks):

    -100 for a reply against the rules, -30 for the assassin, else 0
    + 10 (own words found) / (own words)
    + (the rival's words left) where the team wins, else - (its own words left)

There, each of four seats has its own reward. Here the two seats share one, the rival is the clock of the game for two
(so a limit of turns is not needed), and there is no dictionary: a clue that is no word is allowed. Turns: at most as
many as the rival has words, each a clue and its guesses; with the defaults at most 8 clues and 16 guesses.

Each seat is a conversation, so a trajectory has two sequences, and both are trained with its one advantage. The words
are in `codenames_words.txt`, a list made for this project.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveInt

from environments.base import Environment, Message, Player, Policy, Result, Split, Task

ERROR, ASSASSIN, FOUND = -100.0, -30.0, 10.0
TEST_SEEDS = 1_000_000_000
CLUE = re.compile(r"([a-z]+(?:-[a-z]+)*), ?([1-9])")
END_TURN = "end_turn"
RULES = {
    "spymaster": "You are the spymaster in Codenames. Give a clue for some of the own words: one word that contains "
    "none of the words below, a comma, and for how many it is. For example: animal, 2",
    "guesser": "You are the guesser in Codenames. Reply with one of the words that the clue is for. After a right one "
    "you may also reply: end_turn",
}

Seat = Literal["spymaster", "guesser"]
Colour = Literal["own", "rival", "neutral", "assassin"]
COLOURS: tuple[Colour, ...] = ("own", "rival", "neutral", "assassin")
Ending = Literal["won", "beaten", "assassin", "error"]


class Clue(NamedTuple):
    """What the spymaster says."""

    word: str
    number: int


@dataclass
class Game:
    """The board and whose turn it is."""

    hidden: dict[str, Colour]
    """Words on the board; the rival covers its own in this order."""
    revealed: dict[str, Colour] = field(default_factory=dict)
    """In the order in which they were turned over."""
    clue: Clue | None = None
    """What the guesser is to follow; None where the spymaster is asked."""
    guesses: int = 0
    """Still allowed in this turn."""
    turns: int = 0
    ending: Ending | None = None

    @property
    def seat(self) -> Seat:
        """Who is asked."""
        return "guesser" if self.clue else "spymaster"

    def view(self) -> str:
        """What the seat sees."""
        revealed = ", ".join(f"{word} {colour}" for word, colour in self.revealed.items())
        if self.clue:
            clue = f"{self.clue.word}, {self.clue.number}"
            shown = {"words": _listed(self.hidden), "clue": clue, "guesses": str(self.guesses)}
        else:
            shown = {colour: _listed(self.left(colour)) for colour in COLOURS if self.left(colour)}
        return "\n".join(f"{name}: {text}" for name, text in ({"revealed": revealed or "none"} | shown).items())

    def answer(self, reply: str) -> None:
        """Goes on with the seat's reply."""
        said = reply.strip().lower()
        if self.clue is None:
            self._take_clue(said)
        elif said == END_TURN and self.guesses <= self.clue.number:
            self._end_turn()
        elif said in self.hidden:
            self._take_guess(said)
        else:
            self.ending = "error"

    def left(self, colour: Colour) -> list[str]:
        """Words of a colour that are still on the board."""
        return [word for word, whose in self.hidden.items() if whose == colour]

    def _take_clue(self, said: str) -> None:
        found = CLUE.fullmatch(said)
        if not found or any(word in found[1] for word in self.hidden):
            self.ending = "error"
            return
        self.clue = Clue(found[1], int(found[2]))
        self.guesses, self.turns = self.clue.number + 1, self.turns + 1

    def _take_guess(self, word: str) -> None:
        colour, self.guesses = self._reveal(word), self.guesses - 1
        if not self.ending and (colour != "own" or not self.guesses):
            self._end_turn()

    def _end_turn(self) -> None:
        self.clue = None
        self._reveal(self.left("rival")[0])

    def _reveal(self, word: str) -> Colour:
        colour = self.revealed[word] = self.hidden.pop(word)
        if colour == "assassin":
            self.ending = "assassin"
        elif colour != "neutral" and not self.left(colour):
            self.ending = "won" if colour == "own" else "beaten"
        return colour


class Codenames(Environment):
    """Codenames for a spymaster and a guesser."""

    own_words: Annotated[int, Field(ge=1, le=100)] = 9
    """That the team is to find."""
    rival_words: Annotated[int, Field(ge=1, le=100)] = 8
    """Of which one is covered after each turn."""
    neutral_words: Annotated[int, Field(ge=0, le=100)] = 7
    """That only end a turn. One more word is the assassin: 25 with the defaults."""
    train_tasks: PositiveInt = 8192
    """Tasks to train on."""
    test_tasks: PositiveInt = 256
    """Held-out tasks."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    def deal(self, seed: int) -> Game:
        """A new game: equal seeds, equal boards."""
        counts = (self.own_words, self.rival_words, self.neutral_words, 1)
        colours = [colour for colour, count in zip(COLOURS, counts, strict=True) for _ in range(count)]
        words = Random(seed).sample(sorted(themes()), len(colours))
        return Game(dict(zip(words, colours, strict=True)))

    async def rollout(self, task: Task, policy: Policy) -> Result:
        game, conversations = self.deal(task.seed), _opening()
        while not game.ending:
            messages = conversations[game.seat]
            messages.append({"role": "user", "content": game.view()})
            reply = await policy.chat(messages)
            messages.append({"role": "assistant", "content": reply["content"]})
            game.answer(reply["content"] or "")
        return Result(reward=worth(game), metrics=_metrics(game))

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Both sides of games by players that know the themes of the word list."""
        while True:
            game, conversations = self.deal(random.randrange(TEST_SEEDS)), _opening()
            while not game.ending:
                messages = conversations[game.seat]
                messages.append({"role": "user", "content": game.view()})
                messages.append({"role": "assistant", "content": by_theme(messages)})
                game.answer(messages[-1]["content"])
            yield from conversations.values()

    def players(self) -> Sequence[Player]:
        lowest, highest = ERROR - self.own_words, FOUND + self.rival_words
        return (
            Player("best", lambda messages, random: by_theme(messages), (5.0, highest)),
            Player("random", at_random, (ASSASSIN, 0.0)),
            Player("worst", lambda messages, random: "pass", (lowest, lowest)),
        )


def worth(game: Game) -> float:
    """The reward of a game that is over."""
    found, own_left = list(game.revealed.values()).count("own"), len(game.left("own"))
    penalty = ERROR if game.ending == "error" else ASSASSIN if game.ending == "assassin" else 0.0
    margin = len(game.left("rival")) if game.ending == "won" else -own_left
    return penalty + FOUND * found / (found + own_left) + margin


@cache
def themes() -> dict[str, str]:
    """The theme of each word."""
    lines = Path(__file__).with_name("codenames_words.txt").read_text().splitlines()
    pairs = [line.split(": ") for line in lines if not line.startswith("#")]
    return {word: theme for theme, words in pairs for word in words.split()}


def by_theme(messages: Sequence[Message]) -> str:
    """A good player's reply: clues are themes, and words of a theme are guessed in the order of the alphabet."""
    shown = _read(messages)
    return _theme_guess(shown) if "clue" in shown else _theme_clue(shown)


def at_random(messages: Sequence[Message], random: Random) -> str:
    """A legal reply that means nothing: any theme, any word."""
    shown = _read(messages)
    return random.choice(shown["words"].split()) if "clue" in shown else f"{random.choice(list(themes().values()))}, 1"


def _theme_clue(shown: dict[str, str]) -> str:
    """The theme of which most own words come before any other; where none has one, that which costs least."""
    colours = {word: colour for colour in COLOURS for word in shown.get(colour, "").split()}
    ranks: dict[str, list[int]] = {}
    for word in sorted(colours):
        ranks.setdefault(themes()[word], []).append(COLOURS.index(colours[word]))
    runs = {theme: next((i for i, rank in enumerate(found) if rank), len(found)) for theme, found in ranks.items()}
    theme = max(sorted(runs), key=lambda theme: (runs[theme], -ranks[theme][0]))
    return f"{theme}, {max(1, runs[theme])}"


def _theme_guess(shown: dict[str, str]) -> str:
    theme, number = shown["clue"].split(", ")
    words = shown["words"].split()
    fitting = [word for word in words if themes()[word] == theme]
    first = int(shown["guesses"]) > int(number)
    if fitting and (first or int(shown["guesses"]) > 1):
        return fitting[0]
    return words[0] if first else END_TURN


def _opening() -> dict[str, list[Message]]:
    return {seat: [{"role": "system", "content": rules}] for seat, rules in RULES.items()}


def _read(messages: Sequence[Message]) -> dict[str, str]:
    return dict(line.split(": ") for line in str(messages[-1]["content"]).split("\n"))


def _listed(words: Iterable[str]) -> str:
    return " ".join(sorted(words))


def _metrics(game: Game) -> dict[str, float]:
    endings = {name: float(game.ending == name) for name in ("won", "assassin", "error")}
    return {"turns": game.turns, "found": list(game.revealed.values()).count("own")} | endings
