"""Codenames: the rules reply by reply, what a game is worth, and that both seats of the table are trained."""

import re
from pathlib import Path
from random import Random

import pytest
from environment_fixtures import mean_reward
from rollout_fixtures import stub, venue_at
from stub_server import StubServer

from environments import codenames, load
from environments.codenames import CLUE, RULES, Codenames, Ending, Game, by_theme, themes, worth
from steps.agent.play import play

__all__ = ["stub"]

# Own words found and left, the rival's words left, how it ended, and the reward by hand:
# -100 [error] - 30 [assassin] + 10 found / own, + rival's left if won, else - own left.
REWARDS: list[tuple[int, int, int, Ending, float]] = [
    (9, 0, 8, "won", 10 + 8),
    (9, 0, 3, "won", 10 + 3),
    (9, 0, 1, "won", 10 + 1),
    (8, 1, 0, "beaten", 80 / 9 - 1),
    (4, 5, 0, "beaten", 40 / 9 - 5),
    (0, 9, 0, "beaten", -9),
    (0, 9, 8, "assassin", -30 - 9),
    (6, 3, 2, "assassin", -30 + 60 / 9 - 3),
    (0, 9, 8, "error", -100 - 9),
    (3, 6, 5, "error", -100 + 30 / 9 - 6),
    (8, 1, 1, "error", -100 + 80 / 9 - 1),
    (2, 0, 2, "won", 10 + 2),
    (1, 1, 0, "beaten", 5 - 1),
    (1, 1, 2, "assassin", -30 + 5 - 1),
]

# Replies on the board below, the ending, and the reward by hand. The rival covers rope, then axe.
GAMES: dict[str, tuple[list[str], Ending, float]] = {
    "both words at once": (["animal, 2", "dog", "cat"], "won", 10 + 2),
    "one guess more than the number": (["animal, 1", "dog", "cat"], "won", 10 + 2),
    "a turn each": (["animal, 1", "dog", "end_turn", "pet, 1", "cat"], "won", 10 + 1),
    "a neutral word ends the turn": (["animal, 2", "dog", "oak", "pet, 1", "cat"], "won", 10 + 1),
    "capitals and space": ([" Animal, 2\n", "DOG", " cat "], "won", 10 + 2),
    "no space after the comma": (["animal,2", "dog", "cat"], "won", 10 + 2),
    "words with hyphens": (["four-legged, 2", "dog", "cat"], "won", 10 + 2),
    "the rival is first": (["animal, 1", "oak", "pet, 1", "dog", "end_turn"], "beaten", 5 - 1),
    "a rival's word, then the rival's": (["animal, 2", "dog", "rope"], "beaten", 5 - 1),
    "the rival's last word": (["animal, 1", "oak", "tool, 1", "axe"], "beaten", -2),
    "the assassin": (["metal, 1", "gold"], "assassin", -30 - 2),
    "the assassin, later": (["animal, 2", "dog", "gold"], "assassin", -30 + 5 - 1),
    "no guess": (["animal, 1", "end_turn"], "error", -100 - 2),
    "a word not on the board": (["animal, 1", "bird"], "error", -100 - 2),
    "a word twice": (["animal, 2", "dog", "dog"], "error", -100 + 5 - 1),
    "a guess with a word too many": (["animal, 2", "dog cat"], "error", -100 - 2),
    "a guess that is a clue": (["animal, 2", "animal, 2"], "error", -100 - 2),
    "silence": ([""], "error", -100 - 2),
}

BROKEN_CLUES = ["animal", "animal 2", "animal, 0", "animal, 10", "animal, two", "my animal, 2", "an1mal, 2", "-x, 1"]
BROKEN_CLUES += ["dog, 1", "dogs, 1", "cat-like, 1", "goldfish, 1", ", 1", "animal, 2.", "animal, 2, 3", "tier, ٢"]


def board() -> Game:
    return Game({"dog": "own", "cat": "own", "rope": "rival", "axe": "rival", "oak": "neutral", "gold": "assassin"})


@pytest.mark.parametrize(("found", "own_left", "rival_left", "ending", "reward"), REWARDS)
def test_a_game_is_worth_how_it_ended(
    found: int, own_left: int, rival_left: int, ending: Ending, reward: float
) -> None:
    game = Game(hidden={}, ending=ending)
    game.revealed |= {f"found{i}": "own" for i in range(found)}
    game.hidden |= {f"own{i}": "own" for i in range(own_left)}
    game.hidden |= {f"rival{i}": "rival" for i in range(rival_left)}
    assert worth(game) == pytest.approx(reward)


@pytest.mark.parametrize("name", GAMES)
def test_a_game_goes_by_the_rules(name: str) -> None:
    replies, ending, reward = GAMES[name]
    game = board()
    for reply in replies:
        assert game.ending is None
        game.answer(reply)
    assert (game.ending, worth(game)) == (ending, pytest.approx(reward))


@pytest.mark.parametrize("clue", BROKEN_CLUES)
def test_a_clue_against_the_rules_loses_at_once(clue: str) -> None:
    game = board()
    game.answer(clue)
    assert (game.ending, worth(game)) == ("error", -102)


def test_a_revealed_word_may_be_a_clue() -> None:
    game = board()
    for reply in ("animal, 1", "dog", "end_turn", "dog, 1", "cat"):
        game.answer(reply)
    assert game.ending == "won"


def test_a_turn_has_one_guess_more_than_its_number() -> None:
    game = Game(dict.fromkeys(("dog", "cat", "cow"), "own") | {"rope": "rival", "axe": "rival", "gold": "assassin"})
    game.answer("animal, 1")
    game.answer("dog")
    assert (game.seat, game.guesses) == ("guesser", 1)
    game.answer("cat")
    assert game.seat == "spymaster"
    assert list(game.revealed) == ["dog", "cat", "rope"]


def test_only_the_spymaster_sees_whose_words_they_are() -> None:
    game = board()
    game.answer("animal, 2")
    game.answer("dog")
    assert game.view() == "revealed: dog own\nwords: axe cat gold oak rope\nclue: animal, 2\nguesses: 2"
    game.answer("end_turn")
    assert game.view() == "revealed: dog own, rope rival\nown: cat\nrival: axe\nneutral: oak\nassassin: gold"


def test_the_word_list_has_words_of_one_theme_each() -> None:
    lines = Path(codenames.__file__).with_name("codenames_words.txt").read_text().splitlines()[1:]
    words = [word for line in lines for word in line.split(": ")[1].split()]
    assert len(words) == len(set(words)) == len(themes()) > 400
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    for theme in set(themes().values()):
        assert CLUE.fullmatch(f"{theme}, 1") and not [word for word in words if word in theme]


def test_boards_have_the_words_they_should() -> None:
    environment = Codenames(own_words=3, rival_words=2, neutral_words=1)
    games = [environment.deal(task.seed) for task in environment.tasks("train")[:50]]
    assert all(
        [len(game.left(colour)) for colour in ("own", "rival", "neutral", "assassin")] == [3, 2, 1, 1] for game in games
    )
    assert len({frozenset(game.hidden) for game in games}) == 50


def test_players_of_small_games_are_worth_what_they_say() -> None:
    environment = load("codenames", own_words=2, rival_words=2, neutral_words=1)
    tasks = environment.tasks("test")
    means = {player.name: mean_reward(environment, player.name, tasks) for player in environment.players()}
    for player in environment.players():
        assert player.reward[0] <= means[player.name] <= player.reward[1]
    assert means["worst"] == -102


async def test_both_seats_are_trained_with_one_reward(stub: StubServer) -> None:
    environment = load("codenames")
    stub.reply = lambda request, choice: by_theme(request["messages"])
    async with venue_at(stub, environment) as venue:
        trajectory = await play(venue, environment.tasks("train")[0], attempt=0)
    asked = {seat: [r for r in stub.requests if r["messages"][0]["content"] == RULES[seat]] for seat in RULES}
    assert trajectory.reward is not None and trajectory.turns == len(stub.requests)
    assert len(trajectory.sequences) == 2, "one growing sequence a seat"
    for seat, sequence in zip(("spymaster", "guesser"), trajectory.sequences, strict=True):
        said = [by_theme(request["messages"]) for request in asked[seat]]
        sampled = [token for token, mine in zip(sequence.token_ids, sequence.mask, strict=True) if mine]
        assert said and bytes(token for token in sampled if token < 256).decode() == "".join(said)
    assert sum(sum(sequence.mask) for sequence in trajectory.sequences) == trajectory.completion_tokens


def test_demonstrations_show_both_seats() -> None:
    environment = load("codenames")
    demonstrations = environment.demonstrations(Random(0))
    shown = [next(iter(demonstrations))[0]["content"] for _ in range(4)]
    assert set(shown) == set(RULES.values())
