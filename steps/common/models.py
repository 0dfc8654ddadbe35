"""Which base model a run trains, and the probe that tells whether a server really serves a checkpoint of it."""

from pathlib import Path
from re import fullmatch

from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs

PROBE = "probe.json"
"""The file in a checkpoint's folder that holds its `Probe`."""


def find_model(root: Path, base_model: str) -> str:
    """What transformers and vLLM should load: an absolute folder, or a hub id.

    `base_model` is a hub id (`owner/name`), a folder, or a path relative to the run's folder `root`.
    Raises `InvalidInputs` where it names a folder that does not exist or holds no model.
    """
    inside = root / base_model
    folder = inside if inside.is_dir() else Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInputs(f"{folder} holds no model in transformers' format: there is no config.json in it")
        return str(folder.resolve())
    if not fullmatch(r"[\w.-]+/[\w.-]+", base_model) or folder.parent.is_dir():
        raise InvalidInputs(
            f"there is no base model {base_model!r}, neither in {root} nor as a folder; a hub id reads owner/name"
        )
    return base_model


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
