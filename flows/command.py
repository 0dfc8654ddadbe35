"""`nightschool train`, `evaluate`, `promote`: a flow and what is around it: Prefect's server, logs, closing table."""

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.server import ServerRecord, ensure_server, home, wait_until_ready
from steps.common.errors import NightschoolError
from steps.common.runs import find_run, runs_folder

if TYPE_CHECKING:
    from flows.contest import Contest
    from steps.evaluate_model import ModelServer

HEARTBEATS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
"""Seconds. `nightschool up` has Prefect call a flow run crashed that was not heard of for three times as long."""


def train_with_server(file: Path, overrides: Sequence[str]) -> None:
    """Trains the run that `file` describes and prints what came of it."""
    from flows.config import RunConfig
    from flows.plan import Plan

    config = RunConfig.from_toml(file, overrides).to_train()
    Plan(config)  # says what is wrong with it before anything is started
    server = start_server()

    from flows.train import train

    prepare(server)
    train(config)
    print_result(runs_folder() / config.name, server)


def evaluate_with_server(
    run: str | None,
    env: str | None,
    iteration: int | None,
    model: str | None,
    at: "ModelServer | None",
    overrides: Sequence[str],
) -> None:
    """Has held-out tasks played, and prints how all compare that have played them."""
    from flows.contest import Contest

    contest = Contest.of(run, env, iteration, model, at, overrides)  # says what is wrong before anything is started
    server = start_server()

    from flows.evaluate import evaluate

    prepare(server)
    evaluate(str(contest.root) if run else None, iteration, model, env, at, overrides)
    print_result(contest.root, server)
    print_compared(contest)


def promote_with_server(run: str, iteration: int | None) -> None:
    """Has a checkpoint of a run, the newest where `iteration` is None, meet the champion; prints what came of it."""
    from flows.checkpoints import contenders
    from flows.config import recorded_config
    from flows.plan import Plan

    root = find_run(run)
    challenger, _ = contenders(root, iteration)
    Plan(recorded_config(root))
    server = start_server()

    from flows.champion import promote

    prepare(server)
    promote(str(root), challenger.iteration)
    print_result(root, server)


def start_server() -> ServerRecord | None:
    """Our Prefect server, where no other is configured. It starts while the libraries load: both take seconds."""
    server = None if os.environ.get("PREFECT_API_URL") else ensure_server(home())
    os.environ.update(client_settings(server))
    return server


def prepare(server: ServerRecord | None) -> None:
    """The last thing before a flow: what must be done with its libraries loaded."""
    quieten()
    if server:
        wait_until_ready(home(), server)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Polars takes Ctrl-C when imported, and keeps it


def print_result(root: Path, server: ServerRecord | None) -> None:
    """The closing table, the run's folder and where to look at it."""
    from flows.status import print_status
    from steps.common.status import status_of

    print_status(status_of(root))
    print(f"run   {root}")
    print(f"UI    {server.ui if server else os.environ['PREFECT_API_URL'].removesuffix('/api')}")


def print_compared(contest: "Contest") -> None:
    """How all do that have played in the environment."""
    from flows.status import print_comparison
    from steps.common.comparison import comparison

    found = comparison(contest.root, contest.config.environment.model_dump(mode="json"), checkpoints=True)
    print_comparison(found)


def client_settings(server: ServerRecord | None) -> dict[str, str]:
    """Environment variables for Prefect in this process; they must be set before it is imported."""
    ours = {"PREFECT_API_URL": server.api, "PREFECT_HOME": str(home())} if server else {}
    return {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"} | HEARTBEATS | ours


def quieten() -> None:
    """Keeps off the terminal what the command's last line says: why it failed. Prefect's UI has the tracebacks."""
    from prefect.logging.configuration import setup_logging

    setup_logging()
    for handler in logging.getLogger().handlers:
        handler.addFilter(says_something_new)


def says_something_new(record: logging.LogRecord) -> bool:
    """False for a traceback of an error that explains itself, and for the states that follow from it."""
    explained = record.exc_info and isinstance(record.exc_info[1], NightschoolError)
    return not explained and not record.getMessage().startswith("Finished in state Failed")
