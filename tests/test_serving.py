"""Serving without a server: the command line, the base model, the checks of an adapter."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.models import find_model
from steps.common.settings import LoraSettings
from steps.serving.adapters import validate_adapter
from steps.serving.command import installed_platform, vllm_command
from steps.serving.settings import ServeInputs, ServeSettings

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
