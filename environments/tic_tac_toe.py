"""Tic-tac-toe against an opponent that plays at random.

Asked: a cell name (`b2`), bare or as `<move>b2</move>`. Each turn a user message shows the board, free cells by name:

    X b1 c1
    O b2 c2
    a3 b3 c3

Rewarded, as in OpenPipe ART's example (examples/tic_tac_toe): win 1, draw 0.5, loss 0; an invalid move ends the game
with -1 + ln(m+1)/ln(100), where m is the number of moves made before it. Turns: at most 5.

The opponent's answer to a board is a function of the task's seed and the board, so that the attempts of a group meet
the same opponent and differ by the policy's choices alone.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Literal

from environments.base import Environment, Message, Player, Policy, Result, Split, Task

CELLS = tuple(f"{column}{row}" for row in "123" for column in "abc")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
TEST_SEEDS = 1_000_000_000
MOVE = re.compile(r"<move>(.*?)</move>", re.DOTALL)

Board = tuple[str, ...]
"""Nine cells by row: X, O, or the cell's name where it is free."""


class TicTacToe(Environment):
    """Tic-tac-toe as X or O."""

    plays: Literal["X", "O", "either"] = "X"
    """The agent's side; X moves first; `either` alternates with the seed."""
    train_tasks: int = 8192
    """Tasks to train on."""
    test_tasks: int = 256
    """Held-out tasks."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    async def rollout(self, task: Task, policy: Policy) -> Result:
        agent = self._side(task.seed)
        messages, board, moves = _opening(agent), CELLS, 0
        if agent == "O":
            board = _opponent_moves(board, agent, task.seed)
        while not _over(board):
            messages.append({"role": "user", "content": _show(board)})
            reply = await policy.chat(messages, max_tokens=8)
            messages.append({"role": "assistant", "content": reply["content"]})
            move = parse_move(reply["content"] or "")
            if move not in _free(board):
                return Result(reward=-1 + math.log(moves + 1) / math.log(100), metrics=_metrics(moves, invalid=True))
            board, moves = _play(board, move, agent), moves + 1
            if not _over(board):
                board = _opponent_moves(board, agent, task.seed)
        return Result(reward=_worth(board, agent), metrics=_metrics(moves, invalid=False) | _outcome(board, agent))

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Games of a player that moves at random, legally."""
        while True:
            yield self._demonstration(random)

    def players(self) -> Sequence[Player]:
        return (
            Player(
                "best",
                lambda messages, random: _best(_seen(messages), self._reads_side(messages)),
                (0.9, 1.0),
            ),
            Player("random", lambda messages, random: random.choice(_free(_seen(messages))), (0.4, 0.8)),
            Player("worst", lambda messages, random: "d9", (-1.0, -1.0)),
        )

    def _side(self, seed: int) -> str:
        return ("X", "O")[seed % 2] if self.plays == "either" else self.plays

    @staticmethod
    def _reads_side(messages: Sequence[Message]) -> str:
        return str(messages[0]["content"]).removeprefix("You play ")[0]

    def _demonstration(self, random: Random) -> list[Message]:
        seed = random.randrange(TEST_SEEDS)
        agent = self._side(seed)
        messages, board = _opening(agent), CELLS
        if agent == "O":
            board = _opponent_moves(board, agent, seed)
        while not _over(board):
            move = random.choice(_free(board))
            messages += [{"role": "user", "content": _show(board)}, {"role": "assistant", "content": move}]
            board = _play(board, move, agent)
            if not _over(board):
                board = _opponent_moves(board, agent, seed)
        return messages


def parse_move(reply: str) -> str:
    """The cell named by a reply, which may be no cell at all."""
    tagged = MOVE.findall(reply)
    return str(tagged[-1] if tagged else reply).strip().lower()


def _opening(agent: str) -> list[Message]:
    return [{"role": "system", "content": f"You play {agent} in tic-tac-toe. Reply with one free cell."}]


def _show(board: Board) -> str:
    return "\n".join(" ".join(board[row : row + 3]) for row in (0, 3, 6))


def _seen(messages: Sequence[Message]) -> Board:
    return tuple(str(messages[-1]["content"]).split())


def _free(board: Board) -> list[str]:
    return [cell for cell in board if cell not in "XO"]


def _play(board: Board, cell: str, side: str) -> Board:
    return tuple(side if here == cell else here for here in board)


def _opponent_moves(board: Board, agent: str, seed: int) -> Board:
    choice = Random(f"{seed}|{' '.join(board)}").choice(_free(board))
    return _play(board, choice, _other(agent))


def _other(side: str) -> str:
    return "O" if side == "X" else "X"


def _wins(board: Board, side: str) -> bool:
    return any(all(board[i] == side for i in line) for line in LINES)


def _over(board: Board) -> bool:
    return not _free(board) or _wins(board, "X") or _wins(board, "O")


def _worth(board: Board, agent: str) -> float:
    return 1.0 if _wins(board, agent) else 0.0 if _wins(board, _other(agent)) else 0.5


def _metrics(moves: int, invalid: bool) -> dict[str, float]:
    return {"moves": moves, "invalid": float(invalid), "win": 0.0, "draw": 0.0, "loss": 0.0}


def _outcome(board: Board, agent: str) -> dict[str, float]:
    worth = _worth(board, agent)
    return {"win": float(worth == 1), "draw": float(worth == 0.5), "loss": float(worth == 0)}


@cache
def _value(board: Board, agent: str, to_move: str) -> float:
    """Expected reward of a board when the agent plays best and the opponent at random."""
    if _over(board):
        return _worth(board, agent)
    values = [_value(_play(board, cell, to_move), agent, _other(to_move)) for cell in _free(board)]
    return max(values) if to_move == agent else sum(values) / len(values)


def _best(board: Board, agent: str) -> str:
    return max(_free(board), key=lambda cell: _value(_play(board, cell, agent), agent, _other(agent)))
