"""2048: how tiles slide, what a game is worth, and that it goes on while two tiles can merge."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from environment_fixtures import in_turn, mean_reward, play

from environments import Environment, Message, Result, Task, UnknownEnvironment, load
from environments.twenty_forty_eight import MOVES, Board, add_tile, free, parse_move, show, slide, useful, worth

# Side of the board, target, the last board's tiles, and the reward by hand:
# (log2 largest - 1) / (log2 target - 1) + 0.2 (log2 sum - 1) / (log2(cells target) - 1).
REWARDS: list[tuple[int, int, list[int], float]] = [
    (4, 128, [2, 2], 0 / 6 + 0.2 * 1 / 10),
    (4, 128, [4, 4], 1 / 6 + 0.2 * 2 / 10),
    (4, 128, [8, 4, 4], 2 / 6 + 0.2 * 3 / 10),
    (4, 128, [16, 8, 4, 4], 3 / 6 + 0.2 * 4 / 10),
    (4, 128, [32, 16, 8, 4, 2, 2], 4 / 6 + 0.2 * 5 / 10),
    (4, 128, [64, 32, 16, 8, 8], 5 / 6 + 0.2 * 6 / 10),
    (4, 128, [64, 64, 64, 64], 5 / 6 + 0.2 * 7 / 10),
    (4, 128, [64, 32, 4], 0.946210),  # log2 100 = 6.643856
    (4, 128, [128], 2),
    (4, 128, [128, 64, 2], 2),
    (4, 128, [256], 2),
    (4, 64, [32, 16, 8, 4, 2, 2], 4 / 5 + 0.2 * 5 / 9),
    (3, 32, [16, 8, 4, 4], 0.861577),  # log2 288 = 8.169925
    (3, 32, [8, 4, 4, 2], 0.588423),  # log2 18 = 4.169925
    (2, 16, [8, 4, 2, 2], 2 / 3 + 0.2 * 3 / 5),
    (2, 16, [16, 2], 2),
]


def board_of(size: int, tiles: Sequence[int]) -> Board:
    cells = [*tiles, *[0] * (size**2 - len(tiles))]
    return tuple(tuple(cells[i : i + size]) for i in range(0, size**2, size))


@pytest.mark.parametrize(("size", "target", "tiles", "reward"), REWARDS)
def test_a_game_is_worth_its_last_board(size: int, target: int, tiles: list[int], reward: float) -> None:
    assert worth(board_of(size, tiles), target) == pytest.approx(reward, abs=1e-6)


@pytest.mark.parametrize(
    ("row", "left", "right"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), (0, 0, 4, 4)),
        ((2, 0, 0, 2), (4, 0, 0, 0), (0, 0, 0, 4)),
        ((2, 2, 2, 0), (4, 2, 0, 0), (0, 0, 2, 4)),
        ((4, 2, 2, 0), (4, 4, 0, 0), (0, 0, 4, 4)),  # A merged tile does not merge again.
        ((0, 4, 2, 8), (4, 2, 8, 0), (0, 4, 2, 8)),
        ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_tiles_slide_and_merge_once(row: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert (slide((row,), "left"), slide((row,), "right")) == ((left,), (right,))
    column = tuple((tile,) for tile in row)
    assert slide(column, "up") == tuple((tile,) for tile in left)
    assert slide(column, "down") == tuple((tile,) for tile in right)


def test_new_tiles_fall_alike_for_equal_seeds_and_are_four_one_time_in_ten() -> None:
    board = board_of(3, [2, 4, 8])
    assert add_tile(board, 5) == add_tile(board, 5)
    tiles = Counter(sum(map(sum, add_tile(board, seed))) - 14 for seed in range(4000))
    cells = Counter(cell for seed in range(4000) for cell in set(free(board)) - set(free(add_tile(board, seed))))
    assert set(tiles) == {2, 4} and 0.08 < tiles[4] / 4000 < 0.12
    assert len(cells) == 6 and min(cells.values()) > 4000 / 6 * 0.85


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("left", "left"),
        (" Up\n", "up"),
        ("<move>down</move>", "down"),
        ("Merging the fours.\n<move> right </move>", "right"),
        ("<move>left</move> no, <move>up</move>", "up"),
    ],
)
def test_a_move_is_a_word_or_a_tag(reply: str, move: str) -> None:
    assert parse_move(reply) == move


@pytest.mark.parametrize("reply", ["", "l", "left.", "go left", "left up", "<move></move>", "<move>left", "4", None])
def test_a_reply_that_is_no_move_ends_the_game(reply: str | None) -> None:
    environment = load("twenty_forty_eight")
    task = environment.tasks("train")[0]
    for moves in (0, 2):
        result = play(environment, task, in_turn([*["left", "up"][:moves], reply]))
        assert result.reward == -1
        assert (result.metrics["invalid"], result.metrics["moves"], result.metrics["win"]) == (1, moves, 0)


def boards_of(environment: Environment, task: Task, choose: Callable[[Board], str]) -> tuple[list[Board], Result]:
    """The boards on which a player is asked, and what its game was worth."""
    boards: list[Board] = []

    def answer(messages: Sequence[Message]) -> str:
        rows = str(messages[-1]["content"]).split("\n")
        boards.append(tuple(tuple(0 if tile == "." else int(tile) for tile in row.split()) for row in rows))
        return choose(boards[-1])

    return boards, play(environment, task, answer)


def test_a_move_that_shifts_nothing_still_brings_a_tile() -> None:
    environment = load("twenty_forty_eight")
    idled = 0
    for task in environment.tasks("train")[:40]:
        boards, result = boards_of(
            environment, task, lambda board: next((m for m in MOVES if m not in useful(board)), "")
        )
        assert [16 - len(free(board)) for board in boards] == list(range(2, 2 + len(boards)))
        assert result.metrics["moves"] == len(boards) - 1
        idled += len(boards) - 1
    assert idled > 5


def test_the_game_goes_on_while_two_tiles_can_merge() -> None:
    environment, random, full = load("twenty_forty_eight", size=3, target=64), Random(0), 0
    for task in environment.tasks("train")[:30]:
        boards, result = boards_of(environment, task, lambda board: random.choice(useful(board)))
        full += sum(not free(board) for board in boards)
        assert result.metrics["moves"] == len(boards)
        assert result.metrics["win"] or result.metrics["sum"] > sum(map(sum, boards[-1]))
    assert full > 30


def test_a_game_is_lost_when_nothing_can_shift() -> None:
    assert not useful(((2, 4), (8, 2)))
    environment = load("twenty_forty_eight", size=2, target=32)
    ends = [boards_of(environment, task, lambda board: useful(board)[0])[1] for task in environment.tasks("train")[:40]]
    lost = [end for end in ends if not end.metrics["win"]]
    assert lost
    for end in lost:  # Four tiles of which no two are equal side by side: at least 2 + 4 + 2 + 4.
        assert end.metrics["sum"] >= 12 and end.reward < 1.2


def test_a_move_that_shifts_nothing_on_a_full_board_gives_the_game_up() -> None:
    environment, given_up = load("twenty_forty_eight", size=2, target=32), 0
    for task in environment.tasks("train")[:40]:
        boards, result = boards_of(environment, task, lambda board: "left")
        if not free(boards[-1]) and slide(boards[-1], "left") == boards[-1]:
            assert result.reward == worth(boards[-1], 32)
            given_up += 1
    assert given_up > 5


def test_a_board_is_shown_by_rows() -> None:
    assert show(board_of(2, [2, 0, 16, 4])) == "2 .\n16 4"


@pytest.mark.parametrize(("size", "target"), [(2, 16), (3, 32), (3, 64)])
def test_a_good_player_beats_a_random_one_on_small_boards(size: int, target: int) -> None:
    environment = load("twenty_forty_eight", size=size, target=target)
    best, random = (mean_reward(environment, name, environment.tasks("test")[:64]) for name in ("best", "random"))
    assert -1 < random + 0.2 < best <= 2


@pytest.mark.parametrize(("size", "target"), [(4, 100), (2, 64), (1, 8), (4, 4)])
def test_targets_that_make_no_game_are_refused(size: int, target: int) -> None:
    with pytest.raises(UnknownEnvironment, match=r"target|size"):
        load("twenty_forty_eight", size=size, target=target)
