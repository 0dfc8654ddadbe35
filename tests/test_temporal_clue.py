"""Temporal Clue: each puzzle has one answer, by counting all cases too; and what a reply is worth."""

from collections.abc import Iterable, Iterator
from itertools import permutations, product

import pytest
from environment_fixtures import in_turn, mean_reward, play

from environments import load
from environments._clue_puzzles import NAMES, Puzzle, make_puzzle, read, write
from environments._clue_solver import MURDERER, Clue, answer, solution
from environments.temporal_clue import QUESTIONS, TemporalClue, grade, in_lines

# By hand: the cellar is of 22:00, so the one at 21:00 is Ada, in the study, and the hall is of 20:00. The one at 20:00
# is not in the cellar, thus moved by envy, and without the pistol, which came later. Poison came right before Clara, so
# she is not the first, nor at Ada's 21:00: she is the last, and Ada has the poison. Edith is left for 20:00 and the
# hall, with the rope. The one in the hall is Clara or the murderer: Edith is the murderer.
PUZZLE = """\
suspects: Ada, Clara, Edith
weapons: pistol, poison, rope
rooms: cellar, hall, study
times: 20:00, 21:00, 22:00
motives: ambition, envy, fear
The one moved by envy came before the one with the pistol.
The one at 21:00 is either Ada or the one in the cellar.
The one with the poison came right before Clara.
The one at 20:00 is either the one in the cellar or the one moved by envy.
The one in the cellar is the one at 22:00.
The one in the hall is either Clara or the murderer.
The one in the study is Ada."""
ANSWER = {"suspect": "Edith", "weapon": "rope", "room": "hall", "time": "20:00", "motive": "envy"}
RIGHT = "A. Edith\nB. rope\nC. hall\nD. 20:00\nE. envy"

# Replies to this puzzle, and the reward by hand: (questions answered right) / 5.
REWARDS: list[tuple[str, float]] = [
    (RIGHT, 1.0),
    (RIGHT.upper(), 1.0),
    ("The hall is of 20:00, so\n\n" + RIGHT + "\n", 1.0),
    ("A. Edith\nB. rope\nC. hall\nD. 20:00", 0.8),
    ("A. Ada\nB. rope\nC. hall\nD. 20:00\nE. envy", 0.8),
    ("A. Edith\nB. poison\nC. hall\nD. 21:00\nE. envy", 0.6),
    ("E. envy\n  A.  Edith  ", 0.4),
    ("A. rope\nB. Edith\nC. hall\nD. hall\nE. hall", 0.2),
    ("A. Ada\nB. poison\nC. study\nD. 21:00\nE. fear", 0.0),
    ("A. Ada\n" + RIGHT, 1.0),
    (RIGHT + "\nA. Ada", 0.8),
    (RIGHT + "\nA. ", 1.0),
    ("A. Edith or Ada\nB. the rope\nC. hall.\nD. 20:00\nE. envy", 0.4),
    ("A: Edith\nB) rope\nhall\nD.20:00\nE.\nenvy", 0.0),
    (RIGHT.replace("\n", " "), 0.0),
    ("Edith did it with the rope.", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("reply", "reward"), REWARDS)
def test_a_reply_is_worth_its_share_of_right_answers(reply: str, reward: float) -> None:
    assert grade(reply, ANSWER) / 5 == reward


def test_a_puzzle_solved_by_hand_has_that_answer() -> None:
    puzzle = make_puzzle(1, suspects=3, direct=True)
    assert (write(puzzle), puzzle.answer) == (PUZZLE, ANSWER)


@pytest.mark.parametrize("reply", [RIGHT, "A. Edith\nE. fear", None])
def test_a_rollout_is_one_question(reply: str | None) -> None:
    environment = load("temporal_clue")
    task = environment.tasks("train")[1]
    result = play(environment, task, in_turn([reply]))
    right = grade(reply or "", ANSWER)
    assert result.reward == right / 5
    assert result.metrics == {"right": right, "solved": float(right == 5)}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("suspects", [2, 3])
def test_all_cases_counted_leave_one_answer_and_need_each_clue(suspects: int, direct: bool) -> None:
    for seed in range(8):
        puzzle = make_puzzle(seed, suspects, direct)
        cases = [
            (set(broken(puzzle, times)), tuple(answer(puzzle.categories, times).values()))
            for times in all_cases(puzzle)
        ]
        assert {found for clues, found in cases if not clues} == {tuple(puzzle.answer.values())}
        for clue in puzzle.clues:
            assert len({found for clues, found in cases if clues <= {clue}}) > 1, f"{clue} says nothing new"


def all_cases(puzzle: Puzzle) -> Iterator[dict[str, int]]:
    """Every way in which the day can have been."""
    names = [items for category, items in puzzle.categories.items() if category != "time"]
    indices = range(len(names[0]))
    for murderer, *orders in product(indices, *(list(permutations(indices)) for _ in names)):
        times = {MURDERER: murderer} | {time: i for i, time in enumerate(puzzle.categories["time"])}
        for items, order in zip(names, orders, strict=True):
            times |= dict(zip(items, order, strict=True))
        yield times


def broken(puzzle: Puzzle, times: dict[str, int]) -> Iterable[Clue]:
    return (clue for clue in puzzle.clues if not clue.holds(times))


@pytest.mark.parametrize("suspects", range(2, 9))
def test_the_text_of_a_puzzle_is_enough_to_solve_it(suspects: int) -> None:
    for seed in range(10):
        puzzle = make_puzzle(seed, suspects, direct=seed % 2 == 0)
        categories, clues = read(write(puzzle))
        assert (categories, tuple(clues)) == (puzzle.categories, puzzle.clues)
        assert {len(items) for items in categories.values()} == {suspects}
        times = solution(categories, clues)
        assert times and answer(categories, times) == puzzle.answer


def test_clues_that_contradict_each_other_have_no_solution() -> None:
    categories = {category: names[:2] for category, names in NAMES.items()}
    clues = [Clue("came before", ("Ada", "Bruno")), Clue("came before", ("Bruno", "Ada"))]
    assert solution(categories, clues[:1]) and not solution(categories, clues)


def test_direct_clues_can_be_left_out_and_never_name_the_murderer() -> None:
    for direct in (True, False):
        clues = [clue for seed in range(60) for clue in make_puzzle(seed, 3, direct).clues]
        said = [clue for clue in clues if clue.relation == "is"]
        assert bool(said) == direct
        assert not [clue for clue in said if MURDERER in clue.items]


def test_more_suspects_need_more_clues() -> None:
    lengths = [sum(len(make_puzzle(seed, suspects, True).clues) for seed in range(20)) for suspects in (2, 3, 4, 5)]
    assert lengths == sorted(set(lengths))


def test_no_puzzle_is_in_both_splits() -> None:
    environment = TemporalClue(train_tasks=500, test_tasks=200)
    train, test = (
        {write(environment.puzzle(task.seed)) for task in environment.tasks(split)} for split in ("train", "test")
    )
    assert (len(train), len(test), train & test) == (500, 200, set())


def test_players_are_worth_what_they_say_where_puzzles_are_hard() -> None:
    environment = load("temporal_clue", suspects=4, direct_clues=False)
    tasks = environment.tasks("test")[:100]
    for player in environment.players():
        low, high = player.reward
        assert low <= mean_reward(environment, player.name, tasks) <= high


def test_answers_are_written_as_they_are_asked_for() -> None:
    assert in_lines(ANSWER) == RIGHT
    assert set(QUESTIONS.values()) == set(NAMES)
