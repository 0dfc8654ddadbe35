"""TextArena's games for one player: any of them by name, that it can play offline, scored by the game itself.

Asked: the game's own prompt; then, turn by turn, what the game has said since. The game reads the reply, adds the
brackets that a bare move lacks, and treats a move against its rules as it always does: mostly one is forgiven, and a
second one in a row ends the game. Turns: as the game has it, at most `max_turns`.

Rewarded: the game's own reward, mostly from 0 to 1; 0 where it gives no number, or where `max_turns` ends it; -1, its
usual penalty, where it trips over a reply. For the default, GuessTheNumber-v0 with numbers from 1 to 20 and 11 guesses
(its prompt says 10), that is 1 for the number, else 1 - |last guess - number| / 19, or 0 without any guess.

TextArena plays by Python's global source of chance. Here each game has a state of its own, which follows from the
task's seed, so games that are played at once do not disturb each other. Seeds of the splits are disjoint; where a game
has few beginnings, some are in both. Games for several players would need an opponent, and are refused.

It needs the package `textarena`, of the extra `agents`, wherever games are played: for the flow, the rollouts and
`model.pretrain`.
"""

import io
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from random import Random
from typing import Any

from pydantic import PositiveInt

from environments.base import Environment, Message, Player, Policy, Result, Split, Task, UnknownEnvironment

TEST_SEEDS = 1_000_000_000
DEFAULT = "GuessTheNumber-v0"
RAW = "-raw"
"""Ends the name of a game without TextArena's own rendering of the conversation."""
TRIPPED = -1.0
LONGEST_REASON = 200


class TextarenaGames(Environment):
    """One game of TextArena, again and again."""

    game: str = DEFAULT
    """TextArena's name of it, such as `Mastermind-v0` or `2048-v0-easy`."""
    max_turns: PositiveInt = 100
    """A game that goes on longer is worth 0."""
    train_tasks: PositiveInt = 8192
    """Tasks to train on."""
    test_tasks: PositiveInt = 256
    """Held-out tasks."""

    def tasks(self, split: Split) -> Sequence[Task]:
        Game(self.game, 0)  # A game that can't be played is said now.
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        game, messages, turns = Game(self.game, task.seed), list[Message](), 0
        while not game.over and turns < self.max_turns:
            messages.append({"role": "user", "content": game.said()})
            reply = await policy.chat(messages)
            messages.append({"role": "assistant", "content": reply["content"]})
            game.play(reply["content"] or "")
            turns += 1
        metrics = {"turns": turns, "invalid": game.invalid, "tripped": game.tripped, "finished": game.over}
        return Result(reward=game.reward, metrics={name: float(value) for name, value in metrics.items()})

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Games of a player that halves what is left, of GuessTheNumber; there are none of other games."""
        if not self.game.startswith("GuessTheNumber"):
            raise UnknownEnvironment(f"textarena_games: there are no demonstrations of {self.game}")
        while True:
            game, messages = Game(self.game, random.randrange(TEST_SEEDS)), list[Message]()
            while not game.over:
                messages.append({"role": "user", "content": game.said()})
                messages.append({"role": "assistant", "content": halved(messages)})
                game.play(messages[-1]["content"])
            yield messages

    def players(self) -> Sequence[Player]:
        if self.game != DEFAULT:
            return ()
        return (
            Player("best", lambda messages, random: halved(messages), (1.0, 1.0)),
            Player("random", lambda messages, random: f"[{random.randint(1, 20)}]", (0.5, 0.9)),
            Player("worst", lambda messages, random: "no idea", (0.0, 0.0)),
        )


class Game:
    """One game, with its own chance and nothing on the console. Raises `UnknownEnvironment` if it can't be played."""

    def __init__(self, name: str, seed: int) -> None:
        self.over = self.tripped = False
        self._chance = _chance_of(seed)
        textarena = _textarena(name)
        with self._alone():
            try:
                self._game = _made(textarena, name)
                self._game.reset(num_players=1, seed=seed)
            except (
                ArithmeticError,
                AssertionError,
                ImportError,
                LookupError,
                OSError,
                SyntaxError,
                ValueError,
            ) as error:
                reason = " ".join(str(error).replace("*", " ").split())[:LONGEST_REASON]
                raise UnknownEnvironment(f"TextArena's {name} can't be played here by one player: {reason}") from None
        if not isinstance(self._game.state, textarena.SinglePlayerState):
            raise UnknownEnvironment(f"TextArena's {name} is not for one player")
        self._said = textarena.ObservationType.PLAYER_ACTION

    def said(self) -> str:
        """What the game has said since it was asked last."""
        with self._alone():
            _, observations = self._game.get_observation()
        return "\n".join(str(text).strip() for _, text, kind in observations if kind != self._said)

    def play(self, reply: str) -> None:
        """Goes on with the player's reply."""
        with self._alone():
            try:
                self.over, _ = self._game.step(reply)
            except Exception:  # Some games expect what no one promised, and raise whatever they meet.
                self.over = self.tripped = True

    @property
    def reward(self) -> float:
        """By the game; some of them give a text for a wrong move."""
        rewards = self._game.state.rewards or {}
        reward = rewards.get(0, 0.0)
        return TRIPPED if self.tripped else float(reward) if isinstance(reward, int | float) else 0.0

    @property
    def invalid(self) -> bool:
        """Whether a move against the rules ended it."""
        return bool(self._game.state.game_info[0]["invalid_move"])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        import numpy

        outside = random.getstate(), numpy.random.get_state()
        random.setstate(self._chance[0])
        numpy.random.set_state(self._chance[1])
        try:
            with redirect_stdout(io.StringIO()):
                yield
        finally:
            self._chance = random.getstate(), numpy.random.get_state()
            random.setstate(outside[0])
            numpy.random.set_state(outside[1])


def halved(messages: Sequence[Message]) -> str:
    """A good player's guess: the middle of what the hints have left."""
    low, high = map(int, re.findall(r"between (\d+) and (\d+)", str(messages[0]["content"]))[0])
    guesses = [int(message["content"].strip("[]")) for message in messages if message["role"] == "assistant"]
    hints = [str(message["content"]) for message in messages[1:] if message["role"] == "user"]
    for guess, hint in zip(guesses, hints, strict=True):
        low, high = (guess + 1, high) if "higher" in hint else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def _textarena(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            # Some modules have invalid escapes in their strings, of which Python warns when it compiles them.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            import textarena  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"textarena_games needs the package textarena ({error}): install nightschool[agents]"
        ) from None
    games = [game.removesuffix(RAW) for game in textarena.envs.registration.ENV_REGISTRY if game.endswith(RAW)]
    if name not in games:
        near = get_close_matches(name, games, n=5, cutoff=0.5) or games
        raise UnknownEnvironment(f"TextArena has no game {name!r}; there are {', '.join(near)}")
    return textarena


def _made(textarena: Any, name: str) -> Any:
    """The game, with what the default version of it does to moves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        game = textarena.make(name + RAW)
    for wrapper in textarena.envs.registration.ENV_REGISTRY[name].default_wrappers or ():
        if issubclass(wrapper, textarena.ActionWrapper):
            game = wrapper(game)
    return game


def _chance_of(seed: int) -> tuple[Any, Any]:
    import numpy

    return Random(seed).getstate(), numpy.random.RandomState(seed % 2**32).get_state()
