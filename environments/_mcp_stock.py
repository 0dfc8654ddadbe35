"""A small stockroom and what may be asked about it: the world behind the MCP server that comes with the project.

Everything follows from a seed, and nothing here needs the package `mcp`: `environments._mcp_stock_server` serves it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from environments.base import Message

ITEMS = ("bolts", "candles", "gloves", "hinges", "lamps", "nails", "ropes", "saws", "tapes", "wires")
SHELVES = ("A", "B", "C")
KINDS_OF_ITEM = 5
MOST = 9
"""Pieces in one place, and price."""
TYPES = {"string": str, "integer": int}
STATE = "stock://state"
"""The resource that tells all: the reward reads it, the agent is not told of it."""

Kind = Literal["count", "value", "move", "clear"]
KINDS: tuple[Kind, ...] = ("count", "value", "move", "clear")


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = (
    _tool("find", "On which shelves an item lies, and how many on each.", item="string"),
    _tool("list_shelf", "What lies on a shelf: A, B or C.", shelf="string"),
    _tool("price", "What one piece of an item costs.", item="string"),
    _tool(
        "move",
        "Moves pieces of an item to another shelf.",
        item="string",
        source="string",
        target="string",
        amount="integer",
    ),
)


class StockError(Exception):
    """A tool can't do what it was asked. The message is for the agent."""


def checked(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a tool, where they fit its schema. Raises `StockError`."""
    try:
        return _model(tool).model_validate(arguments).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise StockError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@cache
def _model(tool: str) -> type[BaseModel]:
    [schema] = [each["input_schema"] for each in TOOLS if each["name"] == tool]
    fields: Any = {key: (TYPES[kind["type"]], ...) for key, kind in schema["properties"].items()}
    return create_model(tool, __config__=ConfigDict(extra="forbid", strict=True), **fields)


@dataclass
class Stock:
    """What lies where."""

    pieces: dict[str, dict[str, int]]
    """By shelf and item; never 0."""
    prices: dict[str, int]

    @classmethod
    def of_seed(cls, seed: int) -> Self:
        """Some items, each on one shelf or two."""
        random = Random(f"stock/{seed}")
        items = sorted(random.sample(ITEMS, KINDS_OF_ITEM))
        places = {item: random.sample(SHELVES, random.choice((1, 1, 2))) for item in items}
        pieces = {
            shelf: {item: random.randint(1, MOST) for item in items if shelf in places[item]} for shelf in SHELVES
        }
        return cls(pieces, {item: random.randint(1, MOST) for item in items})

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What a tool answers; `arguments` fit its schema. Raises `StockError`."""
        answer: str = getattr(self, f"_{tool}")(**arguments)
        return answer

    def state(self) -> str:
        """All of it, as JSON: equal stocks, equal text."""
        return json.dumps({"pieces": self.pieces, "prices": self.prices}, sort_keys=True)

    def count(self, item: str) -> int:
        """Pieces on all shelves."""
        return sum(shelf.get(item, 0) for shelf in self.pieces.values())

    def _find(self, item: str) -> str:
        self._known(item)
        found = [f"{shelf}: {pieces[item]}" for shelf, pieces in self.pieces.items() if item in pieces]
        return ", ".join(found)

    def _list_shelf(self, shelf: str) -> str:
        pieces = self._shelf(shelf)
        return ", ".join(f"{item}: {pieces[item]}" for item in sorted(pieces)) or "nothing"

    def _price(self, item: str) -> str:
        self._known(item)
        return str(self.prices[item])

    def _move(self, item: str, source: str, target: str, amount: int) -> str:
        self._known(item)
        there, to = self._shelf(source), self._shelf(target)
        if not 1 <= amount <= there.get(item, 0):
            raise StockError(f"there are {there.get(item, 0)} {item} on shelf {source}, not {amount} to move")
        there[item] -= amount
        to[item] = to.get(item, 0) + amount
        if not there[item]:
            del there[item]
        return f"moved {amount} {item}"

    def _known(self, item: str) -> None:
        if item not in self.prices:
            raise StockError(f"no item {item!r}; there are {', '.join(self.prices)}")

    def _shelf(self, shelf: str) -> dict[str, int]:
        if shelf not in self.pieces:
            raise StockError(f"no shelf {shelf!r}; there are {', '.join(self.pieces)}")
        return self.pieces[shelf]


@dataclass(frozen=True)
class Problem:
    """What is asked of the agent in the stockroom of a seed."""

    seed: int
    kinds: tuple[Kind, ...] = KINDS
    """To choose from."""

    @cached_property
    def kind(self) -> Kind:
        """What is asked for."""
        return self._random("kind").choice(self.kinds)

    @cached_property
    def text(self) -> str:
        """The request."""
        item, source, target, amount = self._chosen
        return {
            "count": f"How many {item} are there? Answer with the number.",
            "value": f"What are all the {item} worth together? Answer with the number.",
            "move": f"Move {amount} {item} from shelf {source} to shelf {target}. Answer: done",
            "clear": f"Move all that lies on shelf {source} to shelf {target}. Answer: done",
        }[self.kind]

    @cached_property
    def answer(self) -> str:
        """The right one."""
        stock, item = Stock.of_seed(self.seed), self._chosen[0]
        if self.kind == "count":
            return str(stock.count(item))
        return str(stock.count(item) * stock.prices[item]) if self.kind == "value" else "done"

    @cached_property
    def state(self) -> str:
        """What the stock must be in the end."""
        stock = Stock.of_seed(self.seed)
        item, source, target, amount = self._chosen
        if self.kind == "move":
            stock.call("move", {"item": item, "source": source, "target": target, "amount": amount})
        if self.kind == "clear":
            for each, pieces in list(stock.pieces[source].items()):
                stock.call("move", {"item": each, "source": source, "target": target, "amount": pieces})
        return stock.state()

    @cached_property
    def _chosen(self) -> tuple[str, str, str, int]:
        """Item, source, target, amount: there are as many pieces of the item at the source."""
        random, stock = self._random("choice"), Stock.of_seed(self.seed)
        source = random.choice([shelf for shelf, pieces in stock.pieces.items() if pieces])
        item = random.choice(sorted(stock.pieces[source]))
        target = random.choice([shelf for shelf in stock.pieces if shelf != source])
        return item, source, target, random.randint(1, stock.pieces[source][item])

    def _random(self, purpose: str) -> Random:
        return Random(f"stock/{purpose}/{self.seed}")


Call = tuple[str, dict[str, Any]]


def next_call(messages: Sequence[Message]) -> Call:
    """What a good agent calls next, by what the conversation says."""
    request = next(str(message["content"]) for message in messages if message["role"] == "user")
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    if found := re.match(r"How many (\w+)", request):
        return _done(str(_total(results[0]))) if results else ("find", {"item": found[1]})
    if found := re.match(r"What are all the (\w+)", request):
        return _value(found[1], results)
    if found := re.match(r"Move (\d+) (\w+) from shelf (\w) to shelf (\w)", request):
        move = {"item": found[2], "source": found[3], "target": found[4], "amount": int(found[1])}
        return _done("done") if results else ("move", move)
    found = re.match(r"Move all that lies on shelf (\w) to shelf (\w)", request)
    assert found, request
    return _clear(found[1], found[2], results)


def _value(item: str, results: list[str]) -> Call:
    if not results:
        return "find", {"item": item}
    return ("price", {"item": item}) if len(results) == 1 else _done(str(_total(results[0]) * int(results[1])))


def _clear(source: str, target: str, results: list[str]) -> Call:
    if not results:
        return "list_shelf", {"shelf": source}
    here = re.findall(r"(\w+): (\d+)", results[0])
    if len(results) > len(here):
        return _done("done")
    item, pieces = here[len(results) - 1]
    return "move", {"item": item, "source": source, "target": target, "amount": int(pieces)}


def _total(found: str) -> int:
    return sum(map(int, re.findall(r": (\d+)", found)))


def _done(answer: str) -> Call:
    return "complete_task", {"answer": answer}
