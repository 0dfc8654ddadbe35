"""A run in containers survives kills of its steps, its flow and its worker, and a restart of Prefect's server.

It is killed in each phase in turn and retried: once with its flow in a process, once with it in a container. In the end
nothing that was finished was done again, nothing half-done is left, and no container or network. Times are printed.
"""

import time
from typing import Any

import pytest
from docker_fixtures import engine
from docker_flow_fixtures import Docked, kill, machine, timed
from machine_fixtures import Machine

from flows.server import stop_server

__all__ = ["engine", "machine"]
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(900)]
OUTAGE = 10.0
"""Seconds without Prefect's server, before it is started again."""


def test_a_flow_in_a_process(machine: Machine, engine: Any) -> None:
    run = Docked(machine, engine, "process")
    second = [shard[1] for shard in run.shards()]
    run.hold_tasks(*second)
    run.hold_training()
    run.ask("train/on-demand")
    run.wait_until_held(*second)
    run.wait_for(lambda: len(run.stored_groups()) == 2, "one finished group a shard")
    stored = run.stored_groups()

    run.kill_containers("rollouts")
    timed("rollouts killed: they go on", run.wait_until_held(*second))
    assert run.stored_groups() == stored
    run.hold_tasks()
    run.wait_until_held("train")
    run.check_manifests()
    trains = run.containers("checkpoints-0001")

    kill(*run.flow_processes())
    timed("flow process killed: Crashed", run.crashes())
    run.retry()
    timed("retried: training is taken up", run.wait_for(lambda: run.taken_up() == 1, "adoption"))
    assert run.containers("checkpoints-0001") == trains
    run.kill_containers("checkpoints-0001")
    timed("training killed: it goes on", run.wait_until_held("train"))

    kill(machine.processes()["nightschool"])  # the worker: its flow goes on
    began = time.monotonic()
    stop_server(machine.home)
    run.release_training()
    time.sleep(OUTAGE)
    machine.up()
    timed("server restarted: it answers", time.monotonic() - began)
    timed("completed", run.wait_for_state("COMPLETED"))
    run.check_the_end()


def test_a_flow_in_a_container(machine: Machine, engine: Any) -> None:
    run = Docked(machine, engine, "container")
    second = [shard[1] for shard in run.shards()]
    run.hold_tasks(*second)
    run.hold_training()
    run.ask("train/containers")
    run.wait_until_held(*second)
    run.wait_for(lambda: len(run.stored_groups()) == 2, "one finished group a shard")
    stored = run.stored_groups()

    run.flow_container().kill()
    timed("flow container killed: Crashed", run.crashes())
    plays = run.containers("rollouts")
    run.retry()
    seconds = run.wait_for(lambda: not set(plays) & set(run.containers("rollouts")), "end of those without a flow")
    timed("retried: rollouts go on", seconds + run.wait_until_held(*second))
    assert run.stored_groups() == stored
    run.hold_tasks()
    run.wait_until_held("train")
    run.check_manifests()
    trains = run.containers("checkpoints-0001")

    kill(machine.processes()["nightschool-docker"])
    run.flow_container().kill()
    timed("worker and flow container killed: Crashed", run.wait_for_state("CRASHED", 120))
    machine.up()
    run.retry()
    timed("retried: training is taken up", run.wait_for(lambda: run.taken_up() == 1, "adoption"))
    assert run.containers("checkpoints-0001") == trains

    kill(machine.processes()["nightschool-docker"])
    run.release_training()
    timed("worker killed: completed all the same", run.wait_for_state("COMPLETED"))
    run.check_the_end()
