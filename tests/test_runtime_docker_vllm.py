"""A real vLLM in a container, and real rollouts in another that play against it."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from docker_fixtures import engine, ours
from vllm_fixtures import checkpoint, tiny_inputs

from environments import load as load_environment
from flows.runtimes.docker import DockerRuntime
from flows.runtimes.docker_settings import DockerSettings
from flows.serving import environment_of
from steps.common.settings import EnvironmentSettings, SamplingSettings
from steps.rollout import ROLLOUT, RolloutInputs
from steps.serving.adapters import load_adapter
from steps.serving.endpoint import Endpoint

__all__ = ["engine"]
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.serve]


def test_rollouts_play_against_the_served_checkpoint(tiny_run: Path, engine: Any) -> None:
    policy = checkpoint(tiny_run / "checkpoints/0001", tiny_run, 1)
    said: list[str] = []
    with closing(DockerRuntime(tiny_run, DockerSettings(type="docker"))) as runtime:
        service = runtime.serve(tiny_inputs(), said.append)
        endpoint = Endpoint.read(service.endpoint)
        assert endpoint
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        assert service.endpoint.stat().st_mode & 0o077 == 0
        served = load_adapter(endpoint, tiny_run, policy)
        assert served.verdict.answers_as == "checkpoint"
        inputs = RolloutInputs(
            checkpoint=policy,
            tasks=load_environment("tic_tac_toe").tasks("train")[:2],
            environment=EnvironmentSettings(name="tic_tac_toe"),
            sampling=SamplingSettings(max_tokens=8),
            seed=0,
            max_failed_fraction=1.0,
            iteration=1,
            shard=0,
            group_size=2,
        )
        path = "iterations/0001/rollouts/000"
        rollouts = runtime.run(ROLLOUT, inputs, path, env=environment_of(served), timeout=120, say=said.append)
        assert rollouts.trajectories == 4
        assert rollouts.completion_tokens > 0
        assert service.alive()
        service.stop()
        assert not service.alive()
        assert not service.endpoint.exists()
    assert ours(engine, tiny_run) == []
