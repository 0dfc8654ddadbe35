"""Every answer that a run has paid its judge for: a file each, named by what was asked.

It lies outside of all artifacts, so that a step which is killed, tried again or rewound asks nothing twice. A bad
answer is kept as well: it was paid for, and whoever asks the same once more is told the same.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steps.common.artifacts import Record, Usage
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.storage import write_atomically
from steps.judge.settings import JudgeSettings, price_of


class Answer(Record):
    """One answer of the judge, and what it took."""

    request: str
    """The key of what was asked."""
    model: str
    """As the server names it."""
    content: str | None
    cut: bool
    """Did it end because it was too long?"""
    usage: Usage


class BudgetSpent(InvalidInputs):
    """The judge may not be asked any more, until its budget is raised."""


class Ledger:
    """The answers in `folder`. One step a run judges at a time; within it, many groups do."""

    def __init__(self, folder: Path, settings: JudgeSettings) -> None:
        self._folder, self._settings = folder, settings
        self.spent = sum((answer.usage for answer in self._all()), Usage())
        """By the whole run."""

    def find(self, key: str) -> Answer | None:
        """The answer to the request with this key, where it was asked before. Raises `CorruptArtifact`."""
        file = self._file(key)
        return self._read(file) if file.exists() else None

    def keep(self, answer: Answer) -> None:
        """Makes an answer durable, before anybody uses it."""
        write_atomically(self._file(answer.request), answer.model_dump_json(indent=1).encode())
        self.spent += answer.usage

    def check_budget(self) -> None:
        """Raises `BudgetSpent`."""
        budget, prices = self._settings.budget, self._settings.prices
        price = price_of(self.spent, prices)
        if budget.tokens is not None and self.spent.tokens >= budget.tokens:
            raise BudgetSpent(_spent("tokens", f"{self.spent.tokens:,}", f"{budget.tokens:,}"))
        if budget.price is not None and price >= budget.price:
            raise BudgetSpent(_spent("price", f"{price:.4g}", f"{budget.price:g}"))

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _all(self) -> Iterator[Answer]:
        return (self._read(file) for file in sorted(self._folder.glob("[!.]*.json")))

    def _read(self, file: Path) -> Answer:
        try:
            return Answer.model_validate_json(file.read_text())
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise CorruptArtifact(
                f"{file} is not an answer of the judge ({message}); delete it, and it is asked again"
            ) from None


def key_of(request: Mapping[str, Any]) -> str:
    """Hex sha256 of all that an answer depends on: model, messages, parameters, form."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _spent(key: str, spent: str, budget: str) -> str:
    return (
        f"the judge has spent {spent} of group.judge.budget.{key} = {budget}: raise it and run the same command, "
        f"which asks nothing twice"
    )
