"""What to serve, and how."""

from typing import Literal

from pydantic import Field

from steps.common.artifacts import Record
from steps.common.settings import Dtype, LoraSettings


class ServeSettings(Record):
    """How vLLM serves the policy. None of it changes what the policy is."""

    max_model_len: int = 2048
    """Longest prompt and completion together, in tokens."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights and cache. On a CPU `cpu_cache_mib` counts."""
    cpu_cache_mib: int = 256
    """Memory for the key-value cache on a CPU."""
    max_cpu_loras: int = 4
    """Adapters kept in memory; others are read again from their folder when asked for."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser that finds the model's tool calls (`hermes`, …); None where agents use no tools."""
    extra_args: list[str] = Field(default_factory=list)
    """More arguments of `vllm serve`, which win over ours. For what is not covered here."""
    startup_timeout: float = 900.0
    """Seconds until the server must answer; weights may have to be downloaded."""
    admin_timeout: float = 60.0
    """Seconds until a load, an unload or a probe of an adapter must be answered."""
    max_restarts: int = 3
    """How often the flow starts a server anew, in one run of the flow, after it died."""
    while_training: Literal["keep", "stop", "sleep"] = "keep"
    """What the server does while a checkpoint is trained, for machines whose GPU does not hold both at once: it stays;
    it is stopped, and starts anew to play; or its weights go to main memory and come back (`sleep`: CUDA only)."""


class ServeInputs(Record):
    """A base model and the shape of the adapters that will be loaded over it."""

    base_model: str
    """A hub id (`owner/name`), a folder, or a path relative to the run's folder."""
    dtype: Dtype = "float32"
    """Of the weights and the cache. In float32 served and trained log-probabilities agree to 1e-5."""
    lora: LoraSettings = LoraSettings()
    settings: ServeSettings = ServeSettings()
