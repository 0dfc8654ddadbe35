"""Serving without a server: the command line, the checks of an adapter, the decision of the probe, the supervision."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from steps.common.errors import CorruptArtifact, InvalidInputs, ServerFault
from steps.common.models import find_model
from steps.common.settings import LoraSettings
from steps.serving.adapters import validate_adapter
from steps.serving.command import installed_platform, vllm_command
from steps.serving.endpoint import Endpoint
from steps.serving.probe import TOLERANCE, judge
from steps.serving.settings import ServeInputs, ServeSettings
from steps.serving.supervisor import reserved_port, wait_until_ready

LORA = LoraSettings(rank=8, alpha=16, target_modules=["q_proj", "v_proj"])
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


# --- the command


def command_for(platform: Any, model: str = "owner/name", **changes: Any) -> tuple[list[str], dict[str, str]]:
    inputs = ServeInputs(base_model=model, lora=LORA, settings=ServeSettings(**changes))
    command = vllm_command(inputs, model, "base-1", 1234, "secret-key", platform, {"PATH": "/bin", "HF_TOKEN": "t"})
    return command.arguments, command.environment


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "127.0.0.1"],
        ["--port", "1234"],
        ["--served-model-name", "base-1"],
        ["--logprobs-mode", "processed_logprobs"],
        ["--generation-config", "vllm"],
        ["--max-lora-rank", "8"],
        ["--lora-target-modules", "q_proj", "v_proj"],
        ["--max-loras", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_platform_gets(platform: str, arguments: list[str]) -> None:
    found, _ = command_for(platform)
    start = found.index(arguments[0])
    assert found[start : start + len(arguments)] == arguments


@pytest.mark.parametrize(
    ("platform", "there", "absent"),
    [
        ("cpu", "--kv-cache-memory-bytes", "--gpu-memory-utilization"),
        ("cpu", "--enforce-eager", "--gpu-memory-utilization"),
        ("cuda", "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        ("cuda", "--gpu-memory-utilization", "--enforce-eager"),
    ],
)
def test_memory_is_given_as_the_platform_counts_it(platform: str, there: str, absent: str) -> None:
    found, _ = command_for(platform)
    assert there in found
    assert absent not in found


def test_the_key_is_in_the_environment_only() -> None:
    arguments, environment = command_for("cpu")
    assert environment["VLLM_API_KEY"] == "secret-key"
    assert not any("secret-key" in argument for argument in arguments)
    assert environment["PATH"] == "/bin"


def test_the_hub_is_out_of_reach_for_a_folder_only(tmp_path: Path) -> None:
    assert command_for("cpu", str(tmp_path))[1]["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in command_for("cpu")[1]


def test_tools_and_own_arguments() -> None:
    assert "--enable-auto-tool-choice" not in command_for("cpu")[0]
    arguments, _ = command_for("cpu", tool_call_parser="hermes", extra_args=["--seed", "3"])
    assert arguments[-2:] == ["--seed", "3"]
    assert arguments[arguments.index("--tool-call-parser") + 1] == "hermes"


@pytest.mark.parametrize(("version", "platform"), [("0.32.0+cpu", "cpu"), ("0.32.0", "cuda"), ("0.32.0+cu130", "cuda")])
def test_the_installed_build_decides(monkeypatch: pytest.MonkeyPatch, version: str, platform: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert installed_platform() == platform


def test_no_vllm_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(InvalidInputs, match="make setup"):
        installed_platform()


# --- the base model


def test_a_model_of_the_run_comes_first(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert find_model(tmp_path, "model") == str(tmp_path / "model")
    assert find_model(tmp_path, str(tmp_path / "model")) == str(tmp_path / "model")
    assert find_model(tmp_path, "owner/some-model.1") == "owner/some-model.1"


@pytest.mark.parametrize("name", ["model", "/nowhere/model", "../model", "{tmp}/model", "a/b/c"])
def test_a_missing_model_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputs, match="there is no base model"):
        find_model(tmp_path, name.format(tmp=tmp_path))


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InvalidInputs, match=r"config\.json"):
        find_model(tmp_path, "model")


def test_a_missing_model_ends_the_command_with_202(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.json"
    inputs.write_text(ServeInputs(base_model="model").model_dump_json())
    arguments = ["--root", tmp_path, "--inputs", inputs, "--endpoint", tmp_path / "e", "--log", tmp_path / "l"]
    ended = subprocess.run(
        [sys.executable, "-m", "steps.serve", *arguments, "--no-lifeline"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 202
    assert ended.stderr.startswith("error: there is no base model 'model'")
    assert ended.stderr.count("\n") == 1


# --- the adapter's files


def write_adapter(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """A sound adapter of one module, with changes: `A` and `B` replace those tensors, None leaves one out."""
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | (config or {})))
    weights: dict[str, Any] = {A: np.ones((8, 4), np.float32), B: np.zeros((6, 8), np.float32)}
    weights |= {{"A": A, "B": B}.get(name, name): value for name, value in tensors.items()}
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "adapter_model.safetensors")


def test_a_sound_adapter_passes(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    validate_adapter(tmp_path, LORA)


ONE_NAN = np.ones((8, 4), np.float32)
ONE_NAN[3, 2] = np.nan
OTHER_MODULE = "model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"A": ONE_NAN}, CorruptArtifact, "q_proj.lora_A.weight holds values that are not finite"),
        ({"B": np.full((6, 8), np.inf, np.float16)}, CorruptArtifact, "not finite"),
        ({"A": np.ones((4, 4), np.float32)}, CorruptArtifact, r"shape \[4, 4\], which does not fit rank 8"),
        ({"B": np.ones((8, 6), np.float32)}, CorruptArtifact, r"shape \[8, 6\], which does not fit rank 8"),
        ({"A": np.ones(8, np.float32)}, CorruptArtifact, r"shape \[8\]"),
        ({"B": None}, CorruptArtifact, "is there without"),
        ({"A": None, "B": None}, CorruptArtifact, "holds no weights"),
        ({OTHER_MODULE: np.ones((8, 4), np.float32)}, InvalidInputs, "belongs to none of q_proj, v_proj"),
        ({"lm_head.weight": np.ones((8, 4), np.float32)}, InvalidInputs, "lm_head"),
        ({"config": {"r": 16}}, InvalidInputs, "the rank is 16, the server was started for 8"),
        ({"config": {"use_dora": True}}, InvalidInputs, "use_dora"),
        ({"config": {"modules_to_save": ["lm_head"]}}, InvalidInputs, "modules_to_save"),
        ({"config": {"peft_type": "IA3"}}, InvalidInputs, "IA3"),
    ],
)
def test_an_unfit_adapter_is_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], says: str) -> None:
    write_adapter(tmp_path, **change)
    with pytest.raises(error, match=says) as caught:
        validate_adapter(tmp_path, LORA)
    assert type(caught.value) is error
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "half", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write_adapter(tmp_path)
    file = tmp_path / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    with pytest.raises(CorruptArtifact, match=name):
        validate_adapter(tmp_path, LORA)


@pytest.mark.parametrize(("bits", "finite"), [(0x3F80, True), (0xFF7F, True), (0x7F80, False), (0xFFC0, False)])
def test_bfloat16_is_checked_too(tmp_path: Path, bits: int, finite: bool) -> None:
    write_adapter(tmp_path)
    data = np.full((8, 4), bits, np.uint16).tobytes() + np.zeros((6, 8), np.uint16).tobytes()
    header = {
        A: {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]},
        B: {"dtype": "BF16", "shape": [6, 8], "data_offsets": [64, 160]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    if finite:
        validate_adapter(tmp_path, LORA)
    else:
        with pytest.raises(CorruptArtifact, match="not finite"):
            validate_adapter(tmp_path, LORA)


# --- the probe's decision


def answers(seed: int, tokens: int, update: float, noise: float, truth: str) -> Any:
    """Expected, alternatives and served log-probabilities, where the server has the weights called `truth`."""
    random = np.random.default_rng(seed)
    base = -random.exponential(2.0, tokens)
    previous = base + random.normal(0, 0.5, tokens)
    expected = previous + random.normal(0, update, tokens)
    source = {"checkpoint": expected, "previous": previous, "base": base, "something else": base[::-1] * 3}[truth]
    return expected, {"previous": previous, "base": base}, source + random.normal(0, noise, tokens)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["checkpoint", "previous", "base", "something else"]))
def test_an_update_below_the_rounding_is_told_apart(seed: int, truth: str) -> None:
    # Each token is rounded by 0.05 and moved by 0.04: no single one tells, 512 do.
    verdict = judge(*answers(seed, 512, 0.04, 0.05, truth), {}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == truth
    if truth in ("checkpoint", "previous"):
        assert verdict.shares["previous"] == pytest.approx(float(truth == "checkpoint"), abs=0.5)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.1))
def test_rounding_alone_never_condemns(seed: int, update: float) -> None:
    assert judge(*answers(seed, 64, update, 0.05, "checkpoint"), {}, TOLERANCE["bfloat16"]).answers_as == "checkpoint"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(1e-5, 1.0))
def test_float32_sees_any_update_worth_the_name(seed: int, update: float) -> None:
    verdict = judge(*answers(seed, 64, update, 1e-6, "previous"), {}, TOLERANCE["float32"])
    assert verdict.answers_as == "previous"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.1))
def test_a_trainer_that_rounds_as_much_does_not_condemn_either(seed: int, update: float) -> None:
    # In bfloat16 most of the difference between the trainer's two answers may be its own rounding.
    expected, alternatives, served = answers(seed, 256, update, 0.05, "checkpoint")
    random = np.random.default_rng(seed + 1)
    expected, *others = (numbers + random.normal(0, 0.05, 256) for numbers in (expected, *alternatives.values()))
    verdict = judge(expected, dict(zip(alternatives, others, strict=True)), served, {}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == "checkpoint"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(2e-4, 0.1), st.booleans())
def test_weights_that_were_not_applied_are_seen_below_any_rounding(seed: int, update: float, applied: bool) -> None:
    expected, alternatives, served = answers(seed, 64, update, 0.05, "checkpoint" if applied else "previous")
    # The server's rounding changes with the weights, and only with them.
    own = answers(seed + 1, 64, update, 0.05, "previous")[2] if applied else served
    verdict = judge(expected, alternatives, served, {"previous": own}, TOLERANCE["bfloat16"])
    assert verdict.answers_as == ("checkpoint" if applied else "previous")


def test_equal_weights_can_not_be_told_apart() -> None:
    expected, alternatives, served = answers(0, 64, 0.0, 1e-6, "checkpoint")
    verdict = judge(expected, alternatives, served, {}, TOLERANCE["float32"])
    assert verdict.answers_as == "checkpoint"
    assert verdict.shares["previous"] is None
    assert verdict.shares["base"] == pytest.approx(1)


def test_nan_is_no_answer() -> None:
    expected, alternatives, served = answers(0, 64, 0.1, 1e-6, "checkpoint")
    served[5] = np.nan
    assert judge(expected, alternatives, served, {}, TOLERANCE["float32"]).answers_as == "something else"


# --- the supervision


def test_the_endpoint_file_is_private(tmp_path: Path) -> None:
    endpoint = Endpoint(
        base_url="http://x/v1",
        api_key="k",
        pid=1,
        model="base",
        root=tmp_path,
        inputs=ServeInputs(base_model="owner/name"),
    )
    assert Endpoint.read(tmp_path / "e.json") is None
    endpoint.write(tmp_path / "e.json")
    assert stat.S_IMODE((tmp_path / "e.json").stat().st_mode) == 0o600
    assert Endpoint.read(tmp_path / "e.json") == endpoint
    (tmp_path / "e.json").write_text("{}")
    with pytest.raises(ServerFault, match=r"e\.json"):
        Endpoint.read(tmp_path / "e.json")


def test_a_reserved_port_is_given_to_nobody() -> None:
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # As vLLM does it:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


@pytest.fixture
def other_server() -> Iterator[tuple[int, list[str]]]:
    """Another run's server on our port: it is healthy and accepts any key. Its port, and the paths it was asked for."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"data": [{"id": "base-2", "root": "owner/name"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def test_another_server_on_the_port_is_not_ours(other_server: tuple[int, list[str]]) -> None:
    port, asked = other_server
    inputs = ServeInputs(base_model="owner/name", settings=ServeSettings(startup_timeout=0.5))
    endpoint = Endpoint(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="k", pid=1, model="base-1", root=Path(), inputs=inputs
    )
    with pytest.raises(ServerFault, match=r"did not answer within 0\.5 s"):
        wait_until_ready(endpoint, alive=lambda: True)
    assert set(asked) == {"/v1/models"}


FAMILY = """
import sys, time
from pathlib import Path
from steps.serving import supervisor
from steps.serving.command import Command
from steps.serving.supervisor import Stopped, running, stop_when_asked

supervisor.GRACE = 0.5
# It ignores SIGTERM, as vLLM does with a request under way, and has a child that would outlive it.
stubborn = Command(["sh", "-c", "trap '' TERM; sleep 1000 & sleep 1001"], {"PATH": "/bin:/usr/bin"})
stop_when_asked(lifeline=True)
try:
    with running(stubborn, Path("log")) as process:
        print(process.pid, flush=True)
        process.wait()
        print("ended", flush=True)
except Stopped:
    print("stopped", flush=True)
"""


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(file.parent.name))
    return found


def gone_within(group: int, seconds: float) -> bool:
    """Waits for the end of a process group."""
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(group)


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGKILL", "leader"])
def test_nothing_outlives_the_supervisor(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as supervisor:
        assert supervisor.stdin and supervisor.stdout
        group = int(supervisor.stdout.readline())
        deadline = time.monotonic() + 10
        while len(members(group)) < 4 and time.monotonic() < deadline:  # guard, leader, two sleeps
            time.sleep(0.05)
        assert len(members(group)) == 4
        if end == "stdin":
            supervisor.stdin.close()
        elif end == "leader":
            os.kill(group, signal.SIGKILL)
        else:
            supervisor.send_signal(getattr(signal, end))
        assert gone_within(group, 15)
        said = supervisor.stdout.read()
        assert said == {"stdin": "stopped\n", "SIGTERM": "stopped\n", "SIGKILL": "", "leader": "ended\n"}[end]
