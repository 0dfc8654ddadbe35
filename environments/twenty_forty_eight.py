"""2048: slide the tiles of a board until one of them reaches the target.

Asked: `left`, `right`, `up` or `down`, bare or as `<move>left</move>`. Each turn a user message shows the board:

    2 . 4 .
    . . 2 .
    8 2 . .
    16 4 2 .

A move slides all tiles; two equal ones that meet become their sum, once a move; then a tile appears in a free cell, 2
with probability 0.9, else 4. A move that shifts nothing is accepted, and the tile appears all the same.

Rewarded, as in OpenPipe ART's example (examples/2048), by the target T and the last board's largest tile and sum:

    2                                                                       for reaching the target
    -1                                                                      for a reply that is no move, at once
    (log2(largest) - 1) / (log2(T) - 1) + 0.2 (log2(sum) - 1) / (log2(cells T) - 1)     else; there, cells = 16

Unlike there, a full board does not end the game as long as two tiles can merge; a move that shifts nothing on it gives
the game up. Turns: at most cells T / 2, as each adds 2 or 4 to the sum; for the
defaults some 80.

The start and each new tile are functions of the task's seed and the board, so that equal moves meet equal luck.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from environments.base import Environment, Message, Player, Policy, Result, Split, Task

MOVES = ("left", "right", "up", "down")
WIN, INVALID = 2.0, -1.0
FOURS = 0.1
TEST_SEEDS = 1_000_000_000
MOVE = re.compile(r"<move>(.*?)</move>", re.DOTALL)

Row = tuple[int, ...]
Board = tuple[Row, ...]
"""Tiles by row; 0 is a free cell."""


class TwentyFortyEight(Environment):
    """2048 on a square board."""

    size: Annotated[int, Field(ge=2, le=8)] = 4
    """Rows, and columns."""
    target: Annotated[int, Field(ge=8)] = 128
    """The tile that wins, a power of two."""
    train_tasks: PositiveInt = 8192
    """Tasks to train on."""
    test_tasks: PositiveInt = 256
    """Held-out tasks."""

    @model_validator(mode="after")
    def _target_can_be_reached(self) -> Self:
        if self.target.bit_count() != 1 or math.log2(self.target) > self.size**2 + 1:
            raise ValueError(f"target {self.target} is no power of two, or can't be reached on {self.size**2} cells")
        return self

    def tasks(self, split: Split) -> Sequence[Task]:
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        messages, board, moves = self._opening(), self._start(task.seed), 0
        while not self._over(board):
            messages.append({"role": "user", "content": show(board)})
            reply = await policy.chat(messages)
            messages.append({"role": "assistant", "content": reply["content"]})
            move = parse_move(reply["content"] or "")
            if move not in MOVES:
                return Result(reward=INVALID, metrics=self._metrics(board, moves) | {"invalid": 1.0})
            shifted, moves = slide(board, move), moves + 1
            if not free(shifted):
                break
            board = add_tile(shifted, task.seed)
        return Result(reward=worth(board, self.target), metrics=self._metrics(board, moves))

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Games of a player that moves at random, but always shifts something."""
        while True:
            seed = random.randrange(TEST_SEEDS)
            messages, board = self._opening(), self._start(seed)
            while not self._over(board):
                move = random.choice(useful(board))
                messages += [{"role": "user", "content": show(board)}, {"role": "assistant", "content": move}]
                board = add_tile(slide(board, move), seed)
            yield messages

    def players(self) -> Sequence[Player]:
        return (
            Player("best", lambda messages, random: best_move(_seen(messages)), (1.4, WIN)),
            Player("random", lambda messages, random: random.choice(useful(_seen(messages))), (0.8, 1.92)),
            Player("worst", lambda messages, random: "stay", (INVALID, INVALID)),
        )

    def _opening(self) -> list[Message]:
        rules = f"You play 2048 on {self.size} x {self.size} cells. Reach {self.target}. Reply with {', '.join(MOVES)}."
        return [{"role": "system", "content": rules}]

    def _start(self, seed: int) -> Board:
        empty = ((0,) * self.size,) * self.size
        return add_tile(add_tile(empty, seed), seed)

    def _over(self, board: Board) -> bool:
        return largest(board) >= self.target or not useful(board)

    def _metrics(self, board: Board, moves: int) -> dict[str, float]:
        won = largest(board) >= self.target
        return {
            "moves": moves,
            "largest": largest(board),
            "sum": sum(map(sum, board)),
            "win": float(won),
            "invalid": 0.0,
        }


def parse_move(reply: str) -> str:
    """The move named by a reply, which may be no move at all."""
    tagged = MOVE.findall(reply)
    return str(tagged[-1] if tagged else reply).strip().lower()


def show(board: Board) -> str:
    """The board by rows; a dot is a free cell."""
    return "\n".join(" ".join(str(tile or ".") for tile in row) for row in board)


def slide(board: Board, move: str) -> Board:
    """The board after the tiles slid and merged; `board` itself where nothing shifts."""
    if move in ("up", "down"):
        return _transposed(slide(_transposed(board), "left" if move == "up" else "right"))
    return tuple(_left(row) if move == "left" else _left(row[::-1])[::-1] for row in board)


def free(board: Board) -> list[tuple[int, int]]:
    """Free cells as row and column."""
    return [(i, j) for i, row in enumerate(board) for j, tile in enumerate(row) if not tile]


def useful(board: Board) -> list[str]:
    """Moves that shift something."""
    return [move for move in MOVES if slide(board, move) != board]


def largest(board: Board) -> int:
    """The largest tile."""
    return max(map(max, board))


def add_tile(board: Board, seed: int) -> Board:
    """The board with one more tile, which depends on the board and the seed alone."""
    random = Random(f"{seed}|{board}")
    i, j = random.choice(free(board))
    tile = 4 if random.random() < FOURS else 2
    return (*board[:i], (*board[i][:j], tile, *board[i][j + 1 :]), *board[i + 1 :])


def worth(board: Board, target: int) -> float:
    """The reward of a game that ended with this board."""
    top, total = largest(board), sum(map(sum, board))
    if top >= target:
        return WIN
    most = len(board) ** 2 * target
    return _log(top) / _log(target) + 0.2 * _log(total) / _log(most)


def best_move(board: Board) -> str:
    """A good player's: it looks at each move for free cells, and for large tiles in a corner."""
    return max(useful(board), key=lambda move: _promise(slide(board, move)))


def _promise(board: Board) -> float:
    lines = [*board, *_transposed(board)]
    smooth = sum(abs(_height(a) - _height(b)) for line in lines for a, b in pairwise(line))
    snake = [tile for i, row in enumerate(board) for tile in (row if i % 2 == 0 else row[::-1])]
    return len(free(board)) - 0.2 * smooth + sum(tile * 0.5**k for k, tile in enumerate(snake)) / largest(board)


def _height(tile: int) -> float:
    return math.log2(tile) if tile else 0.0


def _log(number: int) -> float:
    return math.log2(number) - 1


@cache
def _left(row: Row) -> Row:
    tiles, merged = [tile for tile in row if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        merged.append(tile)
    return (*merged, *(0,) * (len(row) - len(merged)))


def _transposed(board: Board) -> Board:
    return tuple(zip(*board, strict=True))


def _seen(messages: Sequence[Message]) -> Board:
    rows = str(messages[-1]["content"]).split("\n")
    return tuple(tuple(0 if tile == "." else int(tile) for tile in row.split()) for row in rows)
