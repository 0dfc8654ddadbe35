"""The command that starts vLLM: its arguments and environment, for a CPU and for CUDA.

What matters most here is that the log-probabilities the server reports are the ones its sampler used: of the logits
divided by the temperature, with no setting taken from the model's own generation config.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from steps.common.errors import InvalidInputs
from steps.serving.settings import ServeInputs, ServeSettings

Platform = Literal["cpu", "cuda"]
HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
CPU_BATCH = 8192
"""Tokens that one pass may process."""


@dataclass(frozen=True)
class Command:
    """A program to start. The environment holds the API key, the arguments don't: anyone can list those."""

    arguments: list[str]
    environment: dict[str, str]


def installed_platform() -> Platform:
    """What the vLLM installed here runs on, by the version of its build, as vLLM itself decides it.

    Raises `InvalidInputs` where there is no vLLM.
    """
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        raise InvalidInputs(f"vLLM is not installed beside {sys.executable}: run `make setup`") from None


def vllm_command(
    inputs: ServeInputs,
    model: str,
    name: str,
    port: int,
    api_key: str,
    platform: Platform,
    environment: Mapping[str, str] = os.environ,
    host: str = HOST,
) -> Command:
    """Serves `model` (from `find_model`) as `name` on `port` of the address `host`. Raises `InvalidInputs`."""
    settings, lora = inputs.settings, inputs.lora
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
    arguments: list[object] = [
        *(sys.executable, "-m", "steps.serving.launch", "serve", model),
        *("--host", host, "--port", port, "--served-model-name", name),
        *("--dtype", inputs.dtype, "--max-model-len", settings.max_model_len),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--enable-lora", "--max-lora-rank", lora.rank, "--lora-target-modules", *lora.target_modules),
        # Two in a batch: while the last rollouts of one version run, the first of the next may start.
        *("--max-loras", 2, "--max-cpu-loras", settings.max_cpu_loras),
        *(tools if settings.tool_call_parser else ()),
        *_memory(inputs, platform),
        *_sleep(settings, platform, host),
        "--disable-uvicorn-access-log",
        *settings.extra_args,
    ]
    return Command(
        [str(argument) for argument in arguments],
        {**environment, **_environment(model, platform, environment), **_dev_mode(settings), "VLLM_API_KEY": api_key},
    )


def _memory(inputs: ServeInputs, platform: Platform) -> tuple[object, ...]:
    if platform == "cuda":
        return ("--gpu-memory-utilization", inputs.settings.gpu_memory_utilization)
    return (
        *("--kv-cache-memory-bytes", f"{inputs.settings.cpu_cache_mib}M"),
        # Small blocks waste less of a small cache; compiling the model takes a minute on a CPU and gains little.
        *("--block-size", 32, "--enforce-eager"),
        # vLLM 0.32 dies on a CPU when it splits the prompt of a request with a seed, and all of ours have one.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", max(CPU_BATCH, inputs.settings.max_model_len)),
    )


def _sleep(settings: ServeSettings, platform: Platform, host: str) -> tuple[str, ...]:
    """Raises `InvalidInputs` where the server could not sleep, or where others than its owner could wake it."""
    if settings.while_training != "sleep":
        return ()
    if platform == "cpu":
        raise InvalidInputs('serve.while_training = "sleep" frees nothing on a CPU: set it to "stop" or "keep"')
    if host != HOST:
        raise InvalidInputs(
            f'serve.while_training = "sleep" needs a server that only this machine reaches, and this one is on {host}: '
            f'set it to "stop", or run the steps as processes'
        )
    return ("--enable-sleep-mode",)


def _dev_mode(settings: ServeSettings) -> dict[str, str]:
    """The calls that put it to sleep belong to vLLM's development server, which asks for no key."""
    return {"VLLM_SERVER_DEV_MODE": "1"} if settings.while_training == "sleep" else {}


def _environment(model: str, platform: Platform, given: Mapping[str, str]) -> dict[str, str]:
    ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(model).is_dir():
        ours |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if platform == "cpu":
        ours |= {
            # The engine does the model's work itself: one process less to start, to feed and to poll.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The first request with logprobs would compile a kernel: half a minute, and fatal without a compiler.
            "TORCHDYNAMO_DISABLE": "1",
            # Two OpenMP threads on two busy cores spin against each other: calls took ten times longer.
            "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2))),
        }
    return ours
