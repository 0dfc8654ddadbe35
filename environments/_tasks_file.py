"""Tasks from a JSONL file, for agents that exist already: a task a line, checked all at once."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from environments.base import Split, Task, UnknownEnvironment


class Row(BaseModel):
    """A line. Fields that are not listed here belong to the task's data."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)

    id: str
    seed: int = 0
    split: Literal["train", "test"] = "train"
    data: dict[str, Any] = {}

    def task(self) -> Task:
        """The task it describes."""
        return Task(id=self.id, seed=self.seed, data=(self.model_extra or {}) | self.data)


def read_tasks(file: Path, split: Split) -> list[Task]:
    """The tasks of a split, in the file's order. Raises `UnknownEnvironment`, naming the line."""
    rows = [_row(line, f"{file}:{number}") for number, line in _lines(file)]
    return [row.task() for row in _unique(rows, file) if row.split == split]


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        text = file.read_text()
    except OSError as error:
        raise UnknownEnvironment(f"can't read the tasks in {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnknownEnvironment(f"can't read the tasks in {file}: it is not UTF-8 text") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UnknownEnvironment(f"{file} has no tasks: it needs a line of JSON for each")
    return lines


def _row(line: str, where: str) -> Row:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnknownEnvironment(f"{where} is not JSON: {error.msg}") from None
    try:
        return Row.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        wanted = '{"id": "a", "split": "train" or "test", …}'
        raise UnknownEnvironment(f"{where} is not a task like {wanted}: {reason} (got {first['input']!r})") from None


def _unique(rows: list[Row], file: Path) -> list[Row]:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise UnknownEnvironment(f"{file} has the id {row.id!r} twice; every task needs its own")
        seen.add(row.id)
    return rows
