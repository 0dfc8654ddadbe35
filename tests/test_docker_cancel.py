"""A cancelled flow run leaves nothing running, wherever its flow and its steps are, and goes on when it is retried."""

from typing import Any

import pytest
from docker_fixtures import engine
from docker_flow_fixtures import Docked, machine, timed
from machine_fixtures import Machine

__all__ = ["engine", "machine"]
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(900)]
SOON = 15.0
"""Seconds until everything has to be gone."""


def test_what_is_cancelled_ends_and_can_go_on(machine: Machine, engine: Any) -> None:
    """Three at once, since most of their time they wait: steps in processes, in containers, and the flow in one too."""
    processes = Docked(machine, engine, "processes", runtime={"type": "process"})
    runs = {
        "train/on-demand": [processes, Docked(machine, engine, "mixed")],
        "train/containers": [Docked(machine, engine, "containers")],
    }
    for deployment, asked in runs.items():
        for run in asked:
            run.hold_tasks(*(shard[1] for shard in run.shards()))
            run.ask(deployment)
    runs = [run for asked in runs.values() for run in asked]
    for run in runs:
        run.wait_until_held(*(shard[1] for shard in run.shards()))
        assert run.at_work()
        run.check_manifests()
    for run in runs:
        run.cancel()
        timed(f"{run.name} cancelled: nothing is left", run.wait_for(lambda run=run: not run.at_work(), "end", SOON))
        timed(f"{run.name}: Cancelled", run.wait_for_state("CANCELLED"))
    for run in runs:
        assert not run.left()
        run.hold_tasks()
        run.retry()
    for run in runs:
        timed(f"{run.name} retried: completed", run.wait_for_state("COMPLETED"))
        run.check_the_end()
