"""What to serve, and how."""

from pathlib import Path
from re import fullmatch

from pydantic import Field

from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs
from steps.common.models import resolve_base
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


class ServeInputs(Record):
    """A base model and the shape of the adapters that will be loaded over it."""

    base_model: str
    """A hub id (`owner/name`), a folder, or a path relative to the run's folder."""
    dtype: Dtype = "float32"
    """Of the weights and the cache. In float32 served and trained log-probabilities agree to 1e-5."""
    lora: LoraSettings = LoraSettings()
    settings: ServeSettings = ServeSettings()


def find_model(root: Path, base_model: str) -> str:
    """What vLLM should load: an absolute folder or a hub id.

    Raises `InvalidInputs` where it names a folder that does not exist or holds no model.
    """
    model = resolve_base(root, base_model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInputs(f"{folder} holds no model: there is no config.json in it")
        return str(folder.resolve())
    if not fullmatch(r"[\w.-]+/[\w.-]+", model) or folder.parent.is_dir():
        raise InvalidInputs(
            f"there is no base model {base_model!r}, neither in {root} nor as a folder; a hub id reads owner/name"
        )
    return model
