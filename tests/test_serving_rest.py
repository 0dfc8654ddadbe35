"""One GPU shared: the model server gives way to training, and answers for its checkpoint again before anyone plays.

A server that sleeps is a stub here, with vLLM's own endpoints over real HTTP: vLLM sleeps on CUDA only.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from flow_fixtures import Steps, config_of
from test_serving import command_for
from vllm_fixtures import checkpoint, tiny_inputs

from flows.config import RunConfig
from flows.runtimes.inline import InlineRuntime, InlineSettings
from flows.serving import ModelServer
from flows.train import train
from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs, ServerFault
from steps.serving.adapters import PolicyEndpoint
from steps.serving.command import vllm_command
from steps.serving.endpoint import Endpoint
from steps.serving.probe import Verdict
from steps.serving.settings import ServeInputs, ServeSettings


class StubVllm:
    """Sleeps and wakes as vLLM does. Everything that happens to it is told in `events`."""

    def __init__(self, folder: Path, inputs: ServeInputs, events: list[str], fails: set[str]) -> None:
        self.endpoint = folder / "endpoint.json"
        self._events, self._fails = events, fails
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        Thread(target=self._http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._http.server_port}/v1"
        Endpoint(base_url=url, api_key="k", pid=1, model="base-1", root=folder, inputs=inputs).write(self.endpoint)
        events.append("start")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        events, fails = self._events, self._fails

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                events.append(self.path)
                self.send_response(500 if self.path in fails else 200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def alive(self) -> bool:
        return self.endpoint.exists()

    def stop(self) -> None:
        self._events.append("stop")
        self.endpoint.unlink()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def events(steps: Steps) -> list[str]:
    """What the server and the steps did, in order."""
    return steps.made


@pytest.fixture
def fails() -> set[str]:
    """Paths that the stub answers with 500."""
    return set()


@pytest.fixture
def stubbed(events: list[str], fails: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `ModelServer`, with the stub behind it, and checkpoints that always answer as themselves."""

    def load(endpoint: Endpoint, root: Path, checkpoint: Checkpoint) -> PolicyEndpoint:
        events.append(f"probe {checkpoint.iteration}")
        verdict = Verdict(answers_as="checkpoint", rms=0.0, shares={}, moved={})
        model = f"policy-{checkpoint.iteration}"
        return PolicyEndpoint(base_url=endpoint.base_url, api_key="k", model=model, verdict=verdict)

    monkeypatch.setattr("flows.run.ModelServer", ModelServer)
    monkeypatch.setattr("flows.serving.load_adapter", load)
    monkeypatch.setattr("flows.serving.unload_adapter", lambda endpoint, name: events.append(f"unload {name}"))
    monkeypatch.setattr(InlineRuntime, "serve", lambda runtime, inputs, say: StubVllm(tmp_path, inputs, events, fails))


ROLLOUTS = ["iterations/0000/rollouts/000", "iterations/0000/rollouts/001"]
AROUND_TRAINING = {
    "keep": [*ROLLOUTS, "checkpoints/0001", "probe 1", "unload policy-0", "evaluations/0001", "stop"],
    "stop": [*ROLLOUTS, "stop", "checkpoints/0001", "start", "probe 1", "evaluations/0001", "stop"],
    "sleep": [
        *(*ROLLOUTS, "/sleep?level=1", "checkpoints/0001"),
        *("/wake_up", "probe 1", "unload policy-0", "evaluations/0001", "stop"),
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Prefect's own clients are collected rather than closed
@pytest.mark.usefixtures("stubbed", "prefect_server", "runs")
@pytest.mark.parametrize("while_training", AROUND_TRAINING)
def test_training_has_the_gpu_for_itself(while_training: str, events: list[str], tmp_path: Path) -> None:
    # No restart is allowed, so one that was asked for must not count as one.
    train(config_of(tmp_path, "iterations=1", f"serve.while_training={while_training}", "serve.max_restarts=0"))
    events[5:7] = sorted(events[5:7])  # shards play side by side
    before = ["model", "checkpoints/0000", "start", "probe 0", "evaluations/0000"]
    assert events == before + AROUND_TRAINING[while_training]


@contextmanager
def model_server(tmp_path: Path, *overrides: str) -> Iterator[ModelServer]:
    """With settings on top of `sleep`."""
    config = config_of(tmp_path, "serve.while_training=sleep", *overrides)
    with closing(ModelServer(InlineRuntime(tmp_path, InlineSettings(type="inline")), config)) as server:
        yield server


def some_checkpoint() -> Checkpoint:
    return Checkpoint(
        path="checkpoints/0003", digest="d", iteration=3, base_model="model", step=3, updated=True, metrics={}
    )


@pytest.mark.usefixtures("stubbed")
def test_the_same_checkpoint_is_probed_again_after_sleep(events: list[str], tmp_path: Path) -> None:
    with model_server(tmp_path) as server:
        server.rest(print)  # nothing is up: nothing to do
        server.ensure(some_checkpoint(), print)
        server.rest(print)
        server.rest(print)
        server.ensure(some_checkpoint(), print)
        server.ensure(some_checkpoint(), print)
    assert events == ["start", "probe 3", "/sleep?level=1", "/wake_up", "probe 3", "stop"]


@pytest.mark.usefixtures("stubbed")
def test_what_does_not_fall_asleep_is_stopped(events: list[str], fails: set[str], tmp_path: Path) -> None:
    fails.add("/sleep?level=1")
    said: list[str] = []
    with model_server(tmp_path) as server:
        server.ensure(some_checkpoint(), print)
        server.rest(said.append)
        assert events[-2:] == ["/sleep?level=1", "stop"]
        assert "does not fall asleep" in said[0]
        server.ensure(some_checkpoint(), print)


@pytest.mark.usefixtures("stubbed")
def test_what_does_not_wake_up_is_replaced_and_counts_as_dead(
    events: list[str], fails: set[str], tmp_path: Path
) -> None:
    fails.add("/wake_up")
    with model_server(tmp_path, "serve.max_restarts=1") as server:
        for _ in range(2):
            server.ensure(some_checkpoint(), print)
            server.rest(print)
            with pytest.raises(ServerFault, match=r"refused .*/wake_up .500"):
                server.ensure(some_checkpoint(), print)
            assert events[-2:] == ["/wake_up", "stop"]
        with pytest.raises(ServerFault, match="died 2 times"):
            server.ensure(some_checkpoint(), print)


def test_only_cuda_sleeps_and_only_on_loopback() -> None:
    arguments, environment = command_for("cuda", while_training="sleep")
    assert "--enable-sleep-mode" in arguments
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    for other in ("keep", "stop"):
        arguments, environment = command_for("cuda", while_training=other)
        assert "--enable-sleep-mode" not in arguments
        assert "VLLM_SERVER_DEV_MODE" not in environment
    with pytest.raises(InvalidInputs, match='"sleep" frees nothing on a CPU: set it to "stop"'):
        command_for("cpu", while_training="sleep")
    inputs = ServeInputs(base_model="owner/name", settings=ServeSettings(while_training="sleep"))
    with pytest.raises(InvalidInputs, match=r'this one is on 0\.0\.0\.0: set it to "stop"'):
        vllm_command(inputs, "owner/name", "base-1", 1234, "k", "cuda", {}, host="0.0.0.0")


# --- with a real vLLM


def real_config(run: Path, **serve: Any) -> RunConfig:
    """What `tiny_run`'s checkpoints need."""
    inputs = tiny_inputs()
    return RunConfig.model_validate(
        {
            "name": "tiny",
            "iterations": 1,
            "environment": {"name": "tic_tac_toe"},
            "model": {"base": str(run / "model")},
            "lora": inputs.lora.model_dump(),
            "serve": inputs.settings.model_dump() | {"max_restarts": 0} | serve,
        }
    )


@pytest.mark.serve
@pytest.mark.slow
def test_a_real_server_is_stopped_and_comes_back(tiny_run: Path) -> None:
    runtime = InlineRuntime(tiny_run, InlineSettings(type="inline"))
    with closing(ModelServer(runtime, real_config(tiny_run, while_training="stop"))) as server:
        first = server.ensure(checkpoint(tiny_run / "checkpoints/0001", tiny_run, 1), print)
        server.rest(print)
        assert not (tiny_run / "logs/serve/endpoint.json").exists()
        second = server.ensure(checkpoint(tiny_run / "checkpoints/0002", tiny_run, 2), print)
        assert second.verdict.answers_as == "checkpoint"
        assert second.api_key != first.api_key


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.gpu
def test_a_real_server_sleeps_and_answers_as_before(tiny_run: Path) -> None:
    settings = {"while_training": "sleep", "gpu_memory_utilization": 0.5}
    runtime = InlineRuntime(tiny_run, InlineSettings(type="inline"))
    with closing(ModelServer(runtime, real_config(tiny_run, **settings))) as server:
        wanted = checkpoint(tiny_run / "checkpoints/0001", tiny_run, 1)
        server.ensure(wanted, print)
        awake = gpu_memory()
        server.rest(print)
        time.sleep(1)
        assert gpu_memory() < awake / 4
        assert server.ensure(wanted, print).verdict.answers_as == "checkpoint"
        assert server.ensure(checkpoint(tiny_run / "checkpoints/0002", tiny_run, 2), print).verdict.rms < 1e-3


def gpu_memory() -> int:
    """MiB in use on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)
