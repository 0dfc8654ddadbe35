"""A tiny policy and a real vLLM that serves it, made once a session for all tests that need them.

`tests/conftest.py` makes the fixtures known. They need .venvs/train (to make the model) and .venvs/serve.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steps.common.artifacts import Checkpoint
from steps.common.settings import LoraSettings
from steps.serving.settings import ServeInputs, ServeSettings

if TYPE_CHECKING:  # every environment's tests see this file, and not each has an HTTP client
    from steps.serving.endpoint import Endpoint

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0
"""Seconds for what takes 20 on an idle machine."""


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with `model` (random, knows bytes) and checkpoints 0000 (the base), 0001, and 0002 near 0001."""
    run = tmp_path_factory.mktemp("tiny")
    python = ROOT / ".venvs/train/bin/python"
    subprocess.run([python, ROOT / "tests/make_tiny_model.py", run], check=True, timeout=PATIENCE, capture_output=True)
    return run


@pytest.fixture(scope="session")
def vllm_server(tiny_run: Path) -> Iterator["Endpoint"]:
    """vLLM serving `tiny_run`'s model in float32, with adapters of rank 8."""
    with started(tiny_run) as server:
        yield server.endpoint


@dataclass(frozen=True)
class Server:
    """A supervisor and the server it says is up."""

    supervisor: "subprocess.Popen[bytes]"
    endpoint_file: Path
    log: Path

    @property
    def endpoint(self) -> "Endpoint":
        from steps.serving.endpoint import Endpoint

        endpoint = Endpoint.read(self.endpoint_file)
        assert endpoint
        return endpoint


def tiny_inputs(model: str = "model") -> ServeInputs:
    """What `tiny_run`'s checkpoints need."""
    return ServeInputs(
        base_model=model,
        dtype="float32",
        lora=LoraSettings(rank=8, alpha=16, target_modules=["q_proj", "v_proj"]),
        settings=ServeSettings(
            max_model_len=1024, cpu_cache_mib=64, tool_call_parser="hermes", startup_timeout=PATIENCE
        ),
    )


@contextmanager
def started(run: Path, inputs: ServeInputs | None = None) -> Iterator[Server]:
    """A server that is up, ended by the end of its supervisor's input."""
    server = start(run, inputs or tiny_inputs())
    assert server.supervisor.stdin
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.endpoint_file.exists():
            assert server.supervisor.poll() is None, server.log.read_text()[-3000:]
            assert time.monotonic() < deadline, server.log.read_text()[-3000:]
            time.sleep(0.1)
        yield server
    finally:
        server.supervisor.stdin.close()
        server.supervisor.wait(30)


def start(run: Path, inputs: ServeInputs) -> Server:
    """Starts `python -m steps.serve` and does not wait."""
    folder = run / "serve" / str(time.monotonic_ns())
    folder.mkdir(parents=True)
    (folder / "inputs.json").write_text(inputs.model_dump_json())
    endpoint, log = folder / "endpoint.json", folder / "vllm.log"
    command = [ROOT / ".venvs/serve/bin/python", "-m", "steps.serve", "--root", run, "--inputs", folder / "inputs.json"]
    with (folder / "stderr").open("wb") as stderr:
        supervisor = subprocess.Popen(
            [*map(str, command), "--endpoint", str(endpoint), "--log", str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=ROOT,
        )
    return Server(supervisor, endpoint, log)


def checkpoint(folder: Path, run: Path, iteration: int) -> Checkpoint:
    """The checkpoint in `folder` as an artifact, with a digest of its weights and its probe."""
    files = [folder / "adapter_model.safetensors", folder / "probe.json"]
    return Checkpoint(
        path=folder.relative_to(run).as_posix(),
        digest=sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest(),
        iteration=iteration,
        base_model="model",
        step=iteration,
        updated=True,
        metrics={},
    )


def probe_tokens(folder: Path) -> list[int]:
    """Some tokens that the tiny model knows."""
    tokens: list[int] = json.loads((folder / "probe.json").read_text())["sequences"][0]["token_ids"]
    return tokens
