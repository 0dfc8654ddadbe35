"""Which base model a run trains, and the probe that tells whether a server really serves a checkpoint of it."""

from pathlib import Path

from steps.common.artifacts import Record

PROBE = "probe.json"
"""The file in a checkpoint's folder that holds its `Probe`."""


def resolve_base(root: Path, base_model: str) -> str:
    """What transformers and vLLM should load: the run's own folder where `base_model` names one, else `base_model`."""
    inside = root / base_model
    return str(inside.resolve()) if inside.is_dir() else base_model


class ProbeSequence(Record):
    """Some tokens, and log-probabilities (nats, temperature 1) of each but the first, given all before it."""

    token_ids: list[int]
    logprobs: list[float]
    """Under the checkpoint itself."""
    previous: list[float] | None
    """Under the checkpoint before it; None for the first."""
    base: list[float]
    """Under the base model without adapter."""


class Probe(Record):
    """What a server must answer for a checkpoint, computed by the trainer when it made it."""

    dtype: str
    """Of the trainer's weights: how exact the numbers are."""
    sequences: list[ProbeSequence]
