"""Both work pools of a machine, for real: the same records make the same checkpoint wherever its steps run.

One tiny run is made by processes. Two others start from what it made first: one goes on in containers, one with each
step as a flow run, of which those that play are containers and those that train and serve are processes. Both make anew
what the first run made meanwhile. On the way flow runs fail and are killed, and Prefect's own Retry ends them.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from docker_fixtures import engine, ours
from machine_fixtures import Machine, machine, wait_for
from run_fixtures import TINY

from steps.common import layout
from steps.common.artifacts import Manifest, read_manifest
from steps.common.status import damages

__all__ = ["engine", "machine"]
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(1500)]

CONFIG = (
    """
iterations = 1
[environment]
name = "tic_tac_toe"
[rollout]
groups = 4
group_size = 2
groups_per_shard = 4
max_failed_fraction = 1.0
[group]
drop_zero_variance = false
[evaluate]
tasks = 4
max_failed_fraction = 1.0
"""
    + TINY
)
NO_IMAGE = """
[runtime.train]
image = "nightschool/none"
"""
FIRST, LAST = layout.checkpoint(0), layout.checkpoint(1)
PLAYED, GROUPED, EVALUATED = layout.rollouts(0, 0), layout.groups(0), layout.evaluation(1)


def write_config(machine: Machine, name: str, more: str = "") -> str:
    """The settings of a run; returns the file as deployments know it."""
    (machine.project / f"{name}.toml").write_text(f'name = "{name}"\n{CONFIG}{more}')
    return f"{name}.toml"


def start_from(machine: Machine, name: str, *parts: str) -> Path:
    """A run that has some parts of the first one."""
    for part in parts:
        shutil.copytree(machine.runs / "processes" / part, machine.runs / name / part)
    return machine.runs / name


def manifest(root: Path, path: str) -> Manifest:
    found = read_manifest(root / path)
    assert found, f"{root / path} is not there"
    return found


def test_the_same_records_make_the_same_checkpoint_everywhere(machine: Machine, engine: Any) -> None:
    machine.up()
    first = machine.runs / "processes"
    night = machine.asked("train/on-demand", config=write_config(machine, "processes"))
    wait_for((first / FIRST / layout.MANIFEST).exists, 150)
    initialized = manifest(first, FIRST).started
    os.kill(int((first / layout.LOCK).read_text()), signal.SIGKILL)
    machine.crashes(night)
    machine.run("prefect", "flow-run", "retry", night)
    machine.ends("COMPLETED", night)
    assert manifest(first, FIRST).started == initialized

    begun = [layout.MODEL, FIRST, layout.evaluation(0)]
    contained = start_from(machine, "containers", *begun, PLAYED)
    spread = start_from(machine, "spread", *begun, EVALUATED)  # which fits the checkpoint that it will make
    fails = machine.asked("train/containers", config=write_config(machine, "containers", NO_IMAGE))
    other = machine.asked(
        "train/on-demand", config=write_config(machine, "spread"), overrides=["runtime.type=pool", "runtime.poll=0.5"]
    )
    machine.ends("FAILED", fails)
    grouped = manifest(contained, GROUPED).started
    write_config(machine, "containers")
    machine.run("prefect", "flow-run", "retry", fails)
    machine.ends("COMPLETED", fails, other)
    assert manifest(contained, GROUPED).started == grouped

    for root in (contained, spread):
        assert not [wrong for _, wrong in damages(root) if wrong]
        for path in (GROUPED, layout.batch(0), LAST):  # `spread` has played anew, and just as the first run did
            assert manifest(root, path).digest == manifest(first, path).digest
        assert manifest(root, EVALUATED).fingerprint == manifest(first, EVALUATED).fingerprint
        assert manifest(root, LAST).started != manifest(first, LAST).started
    pools = {row["name"]: row["work_pool_name"] for row in machine.rows("flow_runs") if row["parent_task_run_id"]}
    assert pools == {
        "serve spread": "nightschool",
        f"rollout {PLAYED}": "nightschool-docker",
        f"group {GROUPED}": "nightschool-docker",
        f"collate {layout.batch(0)}": "nightschool-docker",
        f"train {LAST}": "nightschool",
    }
    machine.run("nightschool", "down")
    assert ours(engine, machine.runs) == ours(engine, contained) == []
