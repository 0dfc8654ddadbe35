"""Which base model a run trains, and the probe that tells whether a server really serves a checkpoint of it.

Artifacts never hold where a model lies on this machine: a model that the run made is `model` in the run's folder, and
one that was there before is `base`, a link in the run's folder to the model's own. What is the same on every machine is
the digest of its contents.
"""

from pathlib import Path
from re import fullmatch
from uuid import uuid4

from steps.common import layout
from steps.common.artifacts import FileEntry, Record, digest_of, read_manifest
from steps.common.errors import InvalidInputs
from steps.common.settings import Dtype
from steps.common.storage import sha256_of

PROBE = "probe.json"
"""The file in a checkpoint's folder that holds its `Probe`."""
READ = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
"""Suffixes of a model's files: config, weights, tokenizer, template, code. A README doesn't change what is loaded."""


def find_model(root: Path, base_model: str) -> str:
    """What transformers and vLLM should load: an absolute folder, or a hub id.

    `base_model` is a hub id (`owner/name`), a folder, or a path relative to the run's folder `root`.
    Raises `InvalidInputs` where it names a folder that does not exist or holds no model.
    """
    inside = root / base_model
    if base_model == layout.BASE and not inside.is_dir():
        raise InvalidInputs(
            f"there is no base model at {inside}, which links to the model's folder: train the run with that folder as "
            f"model.base, or `ln -sfn FOLDER {inside}`"
        )
    folder = inside if inside.is_dir() else Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInputs(f"{folder} holds no model in transformers' format: there is no config.json in it")
        return str(folder.resolve())
    if not is_on_hub(base_model) or folder.parent.is_dir():
        raise InvalidInputs(
            f"there is no base model {base_model!r}, neither in {root} nor as a folder; a hub id reads owner/name"
        )
    return base_model


def is_on_hub(name: str) -> bool:
    """Is it a hub id, and no folder?"""
    return fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def digest_of_model(folder: Path) -> str:
    """What a base model in a folder is, wherever it lies: one hash of its files' names and contents.

    Reads all of them, at about a gigabyte a second, as whoever loads the model does.
    """
    files = [path for path in sorted(folder.iterdir()) if path.suffix in READ and path.name != layout.MANIFEST]
    return digest_of({path.name: FileEntry(sha256=sha256_of(path), bytes=path.stat().st_size) for path in files})


def link_base(root: Path, folder: Path, digest: str) -> None:
    """Has `root/base` lead to the base model in `folder`, whose contents have `digest`.

    Raises `InvalidInputs` where the run was started on other contents.
    """
    first = read_manifest(root / layout.checkpoint(0))
    known = first.inputs if first else {}
    if known.get("base_model") == layout.BASE and known["base_digest"] != digest:
        raise InvalidInputs(
            f"{folder} does not hold the base model that {root} was started on, or its contents have changed since "
            f"(digest {known['base_digest'][:12]} then, {digest[:12]} now): bring it back, or take another run name"
        )
    link = root / layout.BASE
    if link.is_dir() and not link.is_symlink():
        raise InvalidInputs(f"{link} is in the way of a link to {folder}: move it away")
    aside = link.with_name(f".{link.name}.{uuid4().hex[:8]}")
    aside.symlink_to(folder.resolve())
    aside.replace(link)


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

    dtype: Dtype
    """Of the trainer's weights: how exact the numbers are."""
    sequences: list[ProbeSequence]
