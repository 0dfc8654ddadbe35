"""Environments: every file here without an underscore, but for `base.py`, is one. Yours may live anywhere."""

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from environments._program import ProgramEnvironment
from environments._tasks_file import read_tasks
from environments.base import (
    Environment,
    Failure,
    Message,
    Player,
    Policy,
    Result,
    Split,
    Task,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    UnknownEnvironment,
)

__all__ = [
    "Environment",
    "Failure",
    "Message",
    "Player",
    "Policy",
    "Result",
    "Split",
    "Task",
    "TokenSequence",
    "Trajectory",
    "TrajectoryGroup",
    "UnknownEnvironment",
    "available",
    "load",
]


class CoroutineEnvironment(Environment):
    """An existing agent, unchanged: `async def agent(task, policy)` and its tasks.

    It returns a Result or a number, or has whatever it asks elsewhere post one to `{policy.base_url}/reward`.
    """

    agent: str
    """`package.module:function`"""
    file: Path
    """JSONL: a task a line, `{"id": …, "split": "train" | "test", …}`; what Task does not know goes to its `data`."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return read_tasks(self.file, split)

    async def rollout(self, task: Task, policy: Policy) -> Result:
        result = await _import(self.agent)(task, policy)
        if result is None and policy.posted:
            return policy.posted
        if isinstance(result, Real):
            return Result(reward=float(result))
        if not isinstance(result, Result):
            raise TypeError(f"{self.agent} returned {_short(result)}; it must return a number, or a Result")
        return result


def available() -> list[str]:
    """Names of the environments that come with the project."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.name.startswith("_"))


def load(name: str, **options: Any) -> Environment:
    """The environment called `name`, with its options.

    `name` is one of `available()`; `package.module:Class`; `package.module:function` with the option `file`, a JSONL
    file of tasks; or `program` with `file` and `command`. Raises `UnknownEnvironment`.
    """
    try:
        if name == "program":
            return ProgramEnvironment(**options)
        if ":" not in name:
            return _shipped(name)(**options)
        found = _import(name)
        if inspect.isclass(found) and issubclass(found, Environment):
            return found(**options)
        if inspect.iscoroutinefunction(found):
            return CoroutineEnvironment(agent=name, **options)
    except ValidationError as error:
        raise UnknownEnvironment(_explain(name, error)) from None
    hint = f": write `async def {name.rpartition(':')[2]}(task, policy)`" if inspect.isfunction(found) else ""
    raise UnknownEnvironment(f"{name} is neither an Environment class nor an async function(task, policy){hint}")


def _shipped(name: str) -> type[Environment]:
    if name not in available():
        raise UnknownEnvironment(
            f"there is no environment {name!r}: tried environments/{name}.py; there are {', '.join(available())}. "
            f"For your own write package.module:Class, package.module:function, or program"
        )
    module = importlib.import_module(f"environments.{name}")
    classes = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Environment) and item.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UnknownEnvironment(f"environments/{name}.py must define one Environment class, it defines {len(classes)}")
    return classes[0]


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(f"{path}: {_missing(module_name, error.name or '')}") from None
    except Exception as error:  # whatever a user's module raises when it is run
        raise UnknownEnvironment(f"{path}: {_place(error)}: {type(error).__name__}: {error}") from None
    if not hasattr(module, attribute):
        public = [key for key, item in vars(module).items() if inspect.getmodule(item) is module]
        raise UnknownEnvironment(f"{path}: {module_name} has no {attribute!r}; it has {', '.join(public) or 'nothing'}")
    return getattr(module, attribute)


def _missing(module: str, name: str) -> str:
    if not f"{module}.".startswith(f"{name}."):
        return f"{module} imports {name!r}, which is not installed in {sys.prefix}"
    return f"there is no module {name!r} in {Path.cwd()}, on PYTHONPATH or in {sys.prefix}"


def _place(error: Exception) -> str:
    """The line of the module that is at fault, as far as Python can tell."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def _short(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _explain(name: str, error: ValidationError) -> str:
    first = error.errors()[0]
    option = ".".join(map(str, first["loc"]))
    got = "" if first["type"] == "missing" else f" (got {first['input']!r})"
    return f"environment {name!r}, option {option!r}: {first['msg']}{got}"
