"""What `nightschool evaluate` is asked: whose held-out tasks, and which model plays them.

It starts nothing, so that a question which can't be answered costs nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.checkpoints import iteration_of
from flows.config import RunConfig, recorded_config
from flows.plan import Plan
from steps.common import layout
from steps.common.artifacts import Checkpoint, read_artifact
from steps.common.errors import InvalidInputs
from steps.common.evaluations import BASE
from steps.common.runs import find_run, runs_folder
from steps.evaluate_model import ModelServer

CHECKPOINT = r"(.+)@(\d+)"
MOST_TASKS = 256


@dataclass(frozen=True)
class Own:
    """A checkpoint of the run itself."""

    iteration: int


@dataclass(frozen=True)
class Base:
    """The run's base model, without an adapter."""


@dataclass(frozen=True)
class Guest:
    """A checkpoint of another run, served on this machine."""

    name: str
    root: Path
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Foreign:
    """A model at somebody's server."""

    name: str
    server: ModelServer


Player = Own | Base | Guest | Foreign


@dataclass(frozen=True)
class Contest:
    """Whose tasks, by which settings, and who plays."""

    root: Path
    config: RunConfig
    player: Player
    is_new: bool
    """May the run's record be written? Where it was never trained, these settings are the ones it has."""

    @classmethod
    def of(
        cls,
        run: str | None,
        env: str | None,
        iteration: int | None,
        model: str | None,
        server: ModelServer | None,
        overrides: Sequence[str],
    ) -> "Contest":
        """Raises `InvalidInputs` where the question makes no sense, or can't be answered."""
        if (run is None) == (env is None):
            raise InvalidInputs("name a run, or an environment with --env")
        if model is None and (env or server):
            raise InvalidInputs("say with --model which model is to play: its name, base, or RUN@ITERATION")
        if model is not None and iteration is not None:
            raise InvalidInputs("--iteration and --model name a model each: give one of them")
        if run:
            root = find_run(run)
            config = recorded_config(root, overrides)
        else:
            config = settings_for(env or "", overrides)
            root = runs_folder() / config.name
        player = _player(root, config, model, server) if model else Own(iteration_of(root, iteration))
        Plan(config)
        return cls(root, config, player, is_new=run is None and not layout.numbered(root, "checkpoints"))


def settings_for(env: str, overrides: Sequence[str]) -> RunConfig:
    """Those in a file, or those of an environment by its name: a run called like it, with at most 256 tasks."""
    if env.endswith(".toml"):
        return RunConfig.from_toml(Path(env), overrides)
    name = re.sub("[^A-Za-z0-9._]+", "-", env).strip("-._") or "environment"
    given = {"name": name, "iterations": 1, "environment": {"name": env}}
    config = RunConfig.from_table(given, overrides, f"--env {env}")
    if "tasks" in config.evaluate.model_fields_set:
        return config
    there = len(config.environment.tasks("test"))
    evaluate = config.evaluate.model_copy(update={"tasks": min(MOST_TASKS, max(there, 1))})
    return config.model_copy(update={"evaluate": evaluate})


def _player(root: Path, config: RunConfig, model: str, server: ModelServer | None) -> Player:
    """Who is meant. Where a server is given, the name is always one that it knows."""
    at_checkpoint = re.fullmatch(CHECKPOINT, model)
    if server is None and model == BASE:
        config.to_train()
        return Base()
    if server is None and at_checkpoint:
        return _at_checkpoint(root, config, find_run(at_checkpoint[1]), int(at_checkpoint[2]))
    server = server or ModelServer()
    if config.runtime.type == "docker":
        raise _out_of_reach(f"rollouts can't reach {server.base_url}")
    if config.runtime.type != "pool":  # there, the key is where the steps run
        server.endpoint(model)
    return Foreign(model, server)


def _at_checkpoint(root: Path, config: RunConfig, home: Path, iteration: int) -> Own | Guest:
    iteration = iteration_of(home, iteration)
    if home.resolve() == root.resolve():
        return Own(iteration)
    if config.runtime.type in ("docker", "pool"):
        raise _out_of_reach(f"rollouts can't reach {home.name}@{iteration}, which is served on this machine only")
    checkpoint = read_artifact(Checkpoint, home, layout.checkpoint(iteration))
    return Guest(f"{home.name}@{iteration}", home, checkpoint)


def _out_of_reach(what: str) -> InvalidInputs:
    return InvalidInputs(f"{what}: play in processes here, with --set runtime.type=process")
