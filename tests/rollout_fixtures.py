"""Makers for tests of rollouts: a stub server, a recorder or a venue at it, and steps' inputs."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stub_server import KEY, MODEL, StubServer

from environments import Environment, Policy, load
from steps.agent.gateway import Gateway
from steps.agent.limits import RolloutLimits
from steps.agent.play import Venue
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.upstream import Endpoint, Upstream
from steps.common.artifacts import Checkpoint
from steps.common.settings import EnvironmentSettings, SamplingSettings
from steps.evaluate import EvaluateInputs
from steps.rollout import RolloutInputs

SAMPLING = SamplingSettings(temperature=0.7, max_tokens=120)
QUICK = RolloutLimits(connect_timeout=1, request_timeout=2, rollout_timeout=5, teardown_timeout=0.2, request_retries=1)
CHECKPOINT = Checkpoint(
    path="checkpoints/0003", digest="d", iteration=3, base_model="model", step=0, updated=True, metrics={}
)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


@asynccontextmanager
async def recording(
    server: StubServer | Endpoint,
    seed: str = "seed",
    limits: RolloutLimits = QUICK,
    sampling: SamplingSettings = SAMPLING,
    notices: Notices | None = None,
) -> AsyncIterator[tuple[Recorder, Policy, Gateway]]:
    """A recorder, with a policy that leads to it in this process and through the gateway."""
    endpoint = server if isinstance(server, Endpoint) else Endpoint(server.url, KEY, MODEL)
    async with Upstream(endpoint, limits) as upstream, Gateway(endpoint.model) as gateway:
        recorder = Recorder(upstream, sampling, seed, notices or Notices())
        with gateway.open(recorder.complete) as policy:
            yield recorder, policy, gateway
            await policy.close()


@asynccontextmanager
async def venue_at(
    stub: StubServer, environment: Environment, limits: RolloutLimits = QUICK, notices: Notices | None = None
) -> AsyncIterator[Venue]:
    """Where `play` plays."""
    endpoint = Endpoint(stub.url, KEY, MODEL)
    async with Upstream(endpoint, limits) as upstream, Gateway(MODEL) as gateway:
        yield Venue(environment, upstream, gateway, SAMPLING, limits, notices or Notices(), "seed")


def coroutine_environment(folder: Path, agent: str, tasks: int = 4) -> EnvironmentSettings:
    """The environment of `agents.<agent>`, with a file of tasks in `folder`."""
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": f"task-{i}"}) + "\n" for i in range(tasks)))
    return EnvironmentSettings(name=f"agents:{agent}", options={"file": str(file)})


def rollout_inputs(environment: EnvironmentSettings, **changes: Any) -> RolloutInputs:
    """A small shard: all of the environment's training tasks, twice."""
    tasks = load(environment.name, **environment.options).tasks("train")
    fields: dict[str, Any] = {
        "checkpoint": CHECKPOINT,
        "iteration": 3,
        "shard": 1,
        "tasks": tasks,
        "group_size": 2,
        "environment": environment,
        "sampling": SAMPLING,
        "seed": 7,
        "limits": QUICK,
    }
    return RolloutInputs(**fields | changes)


def evaluate_inputs(environment: EnvironmentSettings, **changes: Any) -> EvaluateInputs:
    """All of the environment's held-out tasks."""
    tasks = load(environment.name, **environment.options).tasks("test")
    fields: dict[str, Any] = {
        "checkpoint": CHECKPOINT,
        "tasks": tasks,
        "environment": environment,
        "sampling": SAMPLING,
        "seed": 7,
        "limits": QUICK,
    }
    return EvaluateInputs(**fields | changes)
