"""Which base model a run trains: a hub id, a folder, or one that the run made itself."""

from pathlib import Path


def resolve_base(root: Path, base_model: str) -> str:
    """What transformers and vLLM should load: the run's own folder where `base_model` is one, else `base_model`."""
    inside = root / base_model
    return str(inside.resolve()) if inside.is_dir() else base_model
