"""TextArena's games as tasks: what a game is worth, that games do not disturb each other, and which can't be played."""

import asyncio
import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
from environment_fixtures import in_turn, mean_reward, play

from environments import Policy, Result, Task, UnknownEnvironment, load
from environments.textarena_games import Game, halved

# GuessTheNumber from 1 to 20 with 11 guesses, where the number is 5, and the reward by hand: 1 for the number, else
# 1 - |last guess - 5| / 19, or 0 without a guess. A wrong move is forgiven once; two in a row end the game.
SEED = 1
LOW = [f"[{i}]" for i in range(6, 17)]
GAMES: dict[str, tuple[list[str], float]] = {
    "at once": (["[5]"], 1.0),
    "in a sentence": (["Is it [5]?"], 1.0),
    "the game adds brackets": (["5"], 1.0),
    "after hints": (["[10]", "[4]", "[5]"], 1.0),
    "after a wrong move": (["five", "[5]"], 1.0),
    "after two wrong moves apart": (["five", "[4]", "[21]", "[5]"], 1.0),
    "eleven guesses": (LOW, 1 - 11 / 19),
    "the eleventh guess": ([*LOW[:10], "[5]"], 1.0),
    "no guess": (["five", "six"], 0.0),
    "a guess, then nonsense": (["[4]", "", ""], 1 - 1 / 19),
    "the same guess again and again": (["[20]", "[20]", "[20]"], 1 - 15 / 19),
    "out of range": (["[21]", "[0]"], 0.0),
    "the last guess counts": (["[4]", "[20]", "?", "?"], 1 - 15 / 19),
    "a guess below zero": (["[-5]", "[-5]"], 0.0),
}


@pytest.mark.parametrize("name", GAMES)
def test_a_game_is_worth_what_textarena_says(name: str) -> None:
    replies, reward = GAMES[name]
    result = play(load("textarena_games"), Task(id="t", seed=SEED), in_turn(replies))
    assert result.reward == pytest.approx(reward)
    assert result.metrics["turns"] == len(replies) and result.metrics["finished"] == 1


def test_what_the_game_says_is_told_once_and_without_ones_own_words() -> None:
    game = Game("GuessTheNumber-v0", SEED)
    assert game.said().startswith("You are Player 0. You are playing Guess The Number.")
    game.play("[10]")
    assert game.said() == "The target number is lower."
    game.play("five")
    assert game.said().startswith("You attempted an invalid move.")


def test_games_that_are_played_at_once_do_not_disturb_each_other_nor_anyone_else() -> None:
    environment = load("textarena_games", game="2048-v0-easy", max_turns=20)
    tasks = environment.tasks("test")[:4]

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)  # the others' turn
        move = ("[up]", "[left]", "[down]", "[right]")[len(request["messages"]) // 2 % 4]
        return {"choices": [{"message": {"role": "assistant", "content": move}}]}

    policy = Policy(complete, base_url="", api_key="", model="m")

    async def all_at_once() -> list[Result]:
        return await asyncio.gather(*(environment.rollout(task, policy) for task in tasks))

    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr,call-overload]
    alone = [asyncio.run(environment.rollout(task, policy)) for task in tasks]
    assert asyncio.run(all_at_once()) == alone
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before  # type: ignore[union-attr,call-overload]
    assert len({Game("2048-v0-easy", task.seed).said() for task in tasks}) == 4


@pytest.mark.parametrize(
    "name",
    [
        "2048-v0-3x3",
        "Bandit-v0",
        "Blackjack-v0",
        "FrozenLake-v0-random",
        "LogicPuzzle-v0",
        "Mastermind-v0",
        "Sokoban-v0",
        "Sudoku-v0-easy",
    ],
)
def test_equal_seeds_begin_alike(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    first, again = (Game(name, seed=3) for _ in range(2))
    assert first.said() == again.said()
    for reply in ("up", "[1]", "?", "?", "?"):
        if not first.over:
            first.play(reply)
            again.play(reply)
            assert (first.over, first.said(), first.reward) == (again.over, again.said(), again.reward)
    assert capfd.readouterr() == ("", ""), "games write nothing on the console"


@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_a_text_for_a_reward_is_none(name: str) -> None:
    """In these TextArena mixes up the reward of a wrong move with its reason."""
    result = play(load("textarena_games", game=name), Task(id="t"), in_turn(["nonsense"] * 9))
    assert (result.reward, result.metrics["invalid"]) == (0, 1)


def test_a_game_that_trips_over_a_reply_is_lost() -> None:
    game = Game("GuessTheNumber-v0", SEED)
    game.play("[" + "9" * 5000 + "]")  # more digits than int() takes
    assert (game.over, game.tripped, game.reward) == (True, True, -1)


def test_a_game_is_cut_after_max_turns() -> None:
    result = play(load("textarena_games", max_turns=2), Task(id="t", seed=SEED), in_turn(["[1]", "[2]"]))
    assert (result.reward, result.metrics["finished"], result.metrics["turns"]) == (0, 0, 2)


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("Mastermind", "TextArena has no game 'Mastermind'; there are Mastermind-v0"),
        ("?", "TextArena has no game"),
        ("Mastermind-v0-raw", "TextArena has no game"),
        ("TicTacToe-v0", "TicTacToe-v0 can't be played here by one player: .*has to be 2"),
        ("QuantumTicTacToe-v0", "QuantumTicTacToe-v0 is not for one player"),
        ("GuessWho-v0", "GuessWho-v0 can't be played here by one player: OpenRouter API key not found"),
    ],
)
def test_a_game_that_can_not_be_played_is_one_line(game: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(UnknownEnvironment, match=message) as error:
        load("textarena_games", game=game).tasks("train")
    assert "\n" not in str(error.value)


def test_other_games_have_no_demonstrations_and_no_players() -> None:
    environment = load("textarena_games", game="Mastermind-v0")
    assert not environment.players()
    with pytest.raises(UnknownEnvironment, match="no demonstrations of Mastermind-v0"):
        next(iter(environment.demonstrations(random.Random(0))))


def test_halving_finds_any_number_of_both_sizes() -> None:
    for name in ("GuessTheNumber-v0", "GuessTheNumber-v0-hardcore"):
        environment = load("textarena_games", game=name)
        assert mean_reward(load("textarena_games"), "best", environment.tasks("test")[:40]) == 1
        for task in environment.tasks("train")[:40]:
            assert play(environment, task, halved).reward == 1


@pytest.mark.parametrize(
    ("environment", "package"),
    [("textarena_games", "textarena"), ("reasoning_gym_tasks", "reasoning_gym"), ("mcp_server", "mcp")],
)
def test_without_its_package_an_environment_says_what_to_install(environment: str, package: str) -> None:
    """In a process of its own, where the package can't be imported."""
    script = f"""
import asyncio, sys
sys.modules[{package!r}] = None
from environments import Task, load
environment = load({environment!r})
try:
    asyncio.run(environment.rollout(environment.tasks("test")[0], None))
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout
    assert said.startswith("UnknownEnvironment") and "install nightschool[" in said, said
