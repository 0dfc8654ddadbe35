"""Every config that makes its model trains two iterations here: the real command, trainer and vLLM, and little of each.

Two runs at a time, with a thread each: a run by itself leaves one of two cores idle for most of its time.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

import pytest

from environments import available
from steps.common.query import select
from steps.common.runs import RUNS
from steps.common.status import damages, status_of

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(900)]

NIGHTSCHOOL = Path(sys.executable).parent / "nightschool"
CONFIGS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))}
MADE = {
    name: settings["environment"]["name"]
    for name, settings in ((name, tomllib.loads(file.read_text())) for name, file in CONFIGS.items())
    if "pretrain" in settings["model"]
}
"""Environments by config. The other configs need a model that is somewhere else."""
NEEDED = {"reasoning_gym_tasks": "reasoning_gym"}
"""Packages that `make setup` leaves out."""
PATIENCE = 600.0
"""Seconds for a run that takes 40 on two idle cores."""

GROUPS, GROUP_SIZE, HELD_OUT = 4, 4, 2
SMALL = {
    "iterations": 2,
    # A model that hardly sees what it reads, but soon talks as it should: so rewards differ, and there is a gradient.
    "model.pretrain.steps": 80,
    "model.pretrain.batch_size": 4,
    "model.pretrain.hidden_size": 64,
    "model.pretrain.layers": 2,
    "model.pretrain.mlp_size": 128,
    "model.pretrain.learning_rate": 1e-2,
    "model.pretrain.warmup_steps": 10,
    "model.pretrain.other_tokens_weight": 0.02,
    "sampling.temperature": 0.5,
    "rollout.groups": GROUPS,
    "rollout.group_size": GROUP_SIZE,
    "rollout.groups_per_shard": GROUPS,
    "evaluate.tasks": HELD_OUT,
    "evaluate.every": 2,
}
UPDATED = {"tic_tac_toe", "twenty_forty_eight", "temporal_clue", "mcp_server", "reasoning_gym_tasks", "textarena_games"}
"""Where such a model's rewards differ. Elsewhere all attempts may fail alike, which is an idle iteration."""
TOOLS = {"email_search", "email_search_langgraph", "mcp_server"}
"""Where it calls tools."""

TEST = "test_a_config_trains_two_iterations"
Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


def missing(name: str) -> str | None:
    """The package without which it can't run."""
    package = NEEDED.get(MADE[name])
    return package if package and not find_spec(package) else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs, and of Prefect's server."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The runs that were asked for, under way."""
    tests = {test.name for test in request.session.items}
    asked = [name for name in MADE if f"{TEST}[{name}]" in tests and not missing(name)]
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        yield {name: pool.submit(train, name, folder) for name in asked}
    finally:
        pool.shutdown(cancel_futures=True)
        nightschool(folder, "down")


def train(name: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    settings = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    return nightschool(folder, "train", str(CONFIGS[name]), "--set", f"name={name}", *settings)


def nightschool(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {RUNS: str(folder), "OMP_NUM_THREADS": "1"}
    command = [str(NIGHTSCHOOL), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("name", MADE)
def test_a_config_trains_two_iterations(name: str, trained: Runs, folder: Path) -> None:
    if package := missing(name):
        pytest.skip(f"{package} is not installed")
    done, root = trained[name].result(), folder / name
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    status = status_of(root)
    assert status.state == "finished" and [each.iteration for each in status.checkpoints] == [0, 1, 2]
    assert [(each.iteration, each.n) for each in status.evaluations] == [(0, HELD_OUT), (2, HELD_OUT)]
    assert not [what for _, what in damages(root) if what]

    played = select(root, "SELECT * FROM trajectories")
    assert len(played) == 2 * GROUPS * GROUP_SIZE and not played["failure_type"].drop_nulls().to_list()
    assert all(isfinite(reward) for reward in [*played["reward"], *(each.reward for each in status.evaluations)])
    assert all(any(sequence["mask"]) for sequences in played["sequences"] for sequence in sequences)
    assert MADE[name] not in TOOLS or any('"role": "tool"' in messages for messages in played["messages"])

    differs = "SELECT DISTINCT iteration + 1 FROM trajectories GROUP BY iteration, task_id HAVING stddev(reward) > 0"
    updated = select(root, "SELECT iteration FROM checkpoints WHERE updated AND iteration > 0")
    assert set(updated["iteration"]) == set(select(root, differs).to_series())
    assert len(updated) or MADE[name] not in UPDATED


def test_every_environment_has_a_config_that_makes_its_model() -> None:
    assert set(available()) - set(MADE.values()) == {"sums"}, "which is for a real small model"
