"""A shard of rollouts (recorder, groups committed, artifact written) against a bare client, on the same vLLM.

    .venv/bin/python benchmarks/rollout.py [games]

Each attempt is 4 turns of 2 sampled tokens. Needs .venvs/train and .venvs/serve; takes a few minutes on two cores.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median

from games import TURNS, Game, play_by_hand

from environments import Task
from steps.agent.limits import RolloutLimits
from steps.common.artifacts import Checkpoint
from steps.common.settings import EnvironmentSettings, SamplingSettings
from steps.rollout import ROLLOUT, RolloutInputs
from steps.serving.endpoint import Endpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from vllm_fixtures import ROOT, checkpoint, started, tiny_inputs

GROUP, CONCURRENCY, ROUNDS = 8, 128, 3


@dataclass(frozen=True)
class Measured:
    """One run over all games."""

    seconds: float
    cpu: float


def measure(work: Callable[[], object]) -> Measured:
    """Wall and processor seconds of this process and of those that it has forked."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    with redirect_stdout(StringIO()):
        work()
    return Measured(time.perf_counter() - wall, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def shard(policy: Checkpoint, tasks: list[Task], number: int) -> RolloutInputs:
    """The inputs of one shard; each round has its own."""
    return RolloutInputs(
        checkpoint=policy,
        iteration=0,
        shard=number,
        tasks=tasks,
        group_size=GROUP,
        environment=EnvironmentSettings(name="games:Game"),
        sampling=SamplingSettings(temperature=0.7),
        seed=number,
        limits=RolloutLimits(concurrency=CONCURRENCY),
    )


def compare(server: Endpoint, policy: Checkpoint, games: int) -> None:
    """Prints the table."""
    os.environ["NIGHTSCHOOL_POLICY_URL"] = server.base_url
    os.environ["NIGHTSCHOOL_POLICY_KEY"] = server.api_key
    os.environ["NIGHTSCHOOL_POLICY_MODEL"] = server.model
    tasks = list(Game(count=games // GROUP).tasks("train"))
    by_hand, by_step = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):  # The first round warms up, and is thrown away.
            hand = play_by_hand(server.base_url, server.api_key, server.model, tasks, GROUP, CONCURRENCY)
            by_hand.append(measure(lambda work=hand: asyncio.run(work)))
            inputs = shard(policy, tasks, number)
            by_step.append(measure(lambda i=inputs: ROLLOUT.run(i, Path(folder), f"rollouts/{i.shard:03d}")))
    requests = games * TURNS
    print(f"| {requests} requests, median of {ROUNDS} | requests/s | client's processor time a request, ms |")
    print("|---|---|---|")
    for name, rounds in (("bare client", by_hand[1:]), ("rollout step", by_step[1:])):
        seconds, cpu = median(r.seconds for r in rounds), median(r.cpu for r in rounds)
        print(f"| {name} | {requests / seconds:.0f} | {1e3 * cpu / requests:.2f} |")
    ratios = [hand.seconds / step.seconds for hand, step in zip(by_hand[1:], by_step[1:], strict=True)]
    print(f"\nratio {median(ratios):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


def main() -> None:
    """Serves a tiny random model and compares."""
    games = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        make = [ROOT / ".venvs/train/bin/python", ROOT / "tests/make_tiny_model.py", run]
        subprocess.run(make, check=True, timeout=300, capture_output=True)
        with started(run, tiny_inputs()) as server:
            compare(server.endpoint, checkpoint(run / "checkpoints/0001", run, 1), games)


if __name__ == "__main__":
    main()
