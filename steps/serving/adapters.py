"""Adapters on a running server: checked before they are loaded, and probed before anything is played.

Each version has a name and a folder of its own, and is never loaded over another: vLLM's prefix cache knows an adapter
by name and folder, and would answer from what the old weights left there.
"""

import json
from pathlib import Path
from re import fullmatch
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from steps.common.artifacts import Checkpoint, Record, refuse_pruned
from steps.common.errors import CorruptArtifact, InvalidInputs, WrongWeights
from steps.common.settings import LoraSettings
from steps.serving.endpoint import Client, Endpoint, Refused
from steps.serving.probe import Verdict, check_served

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication")
"""Fields of PEFT's LoraConfig that vLLM does not serve, or serves otherwise than PEFT trains."""


class PolicyEndpoint(Record):
    """Where a checkpoint is served, and as what."""

    base_url: str
    api_key: str
    model: str
    verdict: Verdict
    """How it answered its probe."""


def load_adapter(endpoint: Endpoint, root: Path, checkpoint: Checkpoint) -> PolicyEndpoint:
    """Makes the server answer for `checkpoint`, and makes sure that it does. Loading again only probes again.

    Raises `CorruptArtifact` and `InvalidInputs` for an adapter that can't be served, `WrongWeights` where the server
    does not answer as the checkpoint, `ServerFault` where it does not answer.
    """
    folder, served_from = root / checkpoint.path, endpoint.root / checkpoint.path
    refuse_pruned(folder)
    version, before = (f"{root.resolve().name}-{checkpoint.iteration - age:04d}-" for age in (0, 1))
    name = version + checkpoint.digest[:8]
    with Client(endpoint) as client:
        if name not in client.models():
            validate_adapter(folder, endpoint.inputs.lora)
            _load(client, name, served_from)
        models = client.models()
        if (source := models.get(name)) != str(served_from):
            raise WrongWeights(f"the server knows {name} from {source}, not from {served_from}: start it again")
        served = {"previous": other for other in models if other.startswith(before)}  # noqa: B035 (one at most)
        # vLLM 0.32 on a CPU answers for the base with an adapter that is in the same batch, so the base can be asked
        # only where no other adapter may be at work.
        if models.keys() == {endpoint.model, name}:
            served = {"base": endpoint.model}
        verdict = check_served(client, name, folder, endpoint.inputs.dtype, served)
    return PolicyEndpoint(base_url=endpoint.base_url, api_key=endpoint.api_key, model=name, verdict=verdict)


def unload_adapter(endpoint: Endpoint, name: str) -> None:
    """Forgets an adapter, after its last request. Its folder must stay as long as the server may read it again."""
    with Client(endpoint) as client:
        if name in client.models():
            client.unload_adapter(name)


def _load(client: Client, name: str, folder: Path) -> None:
    try:
        client.load_adapter(name, folder)
    except Refused as refusal:
        client.models()  # raises ServerFault where the server, not the adapter, is at fault
        raise InvalidInputs(f"{folder}: vLLM can't serve this adapter: {refusal}") from None


def validate_adapter(folder: Path, lora: LoraSettings) -> None:
    """Checks that the adapter is one the server was started for, whole and finite.

    Raises `CorruptArtifact` for files that are missing or damaged, `InvalidInputs` for an adapter of another kind.
    """
    config = _read_config(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise InvalidInputs(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA can be served")
    for name in UNSUPPORTED:
        if config.get(name):
            raise InvalidInputs(f"{folder / CONFIG}: {name} is {config[name]!r}, which vLLM can't serve")
    if (rank := config.get("r")) != lora.rank:
        raise InvalidInputs(f"{folder / CONFIG}: the rank is {rank}, the server was started for {lora.rank}")
    shapes = _finite_shapes(folder / WEIGHTS)
    _check_pairs(folder / WEIGHTS, shapes, lora)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise CorruptArtifact(f"{file} is missing") from None
    except ValueError as error:
        raise CorruptArtifact(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CorruptArtifact(f"{file} holds no adapter's config")
    return config


def _finite_shapes(file: Path) -> dict[str, list[int]]:
    """Each tensor's shape, once all its values are known to be finite."""
    try:
        tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise CorruptArtifact(f"{file} is missing") from None
    except SafetensorError as error:
        raise CorruptArtifact(f"{file} is damaged: {error}") from None
    for name, tensor in tensors:
        if not _all_finite(tensor["dtype"], tensor["data"]):
            raise CorruptArtifact(f"{file}: {name} holds values that are not finite")
    return {name: tensor["shape"] for name, tensor in tensors}


def _all_finite(dtype: str, data: bytes) -> bool:
    if dtype == "BF16":  # unknown to numpy: not finite where all bits of the exponent are set
        return not bool(((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype])).all())


def _check_pairs(file: Path, shapes: dict[str, list[int]], lora: LoraSettings) -> None:
    """Every A is `(rank, in)`, has a B of `(out, rank)`, and belongs to a module that the server expects."""
    if not shapes:
        raise CorruptArtifact(f"{file} holds no weights")
    for name, shape in shapes.items():
        match = fullmatch(r"(.+\.([^.]+))\.lora_([AB])\.weight", name)
        if not match or match[2] not in lora.target_modules:
            raise InvalidInputs(f"{file}: {name} belongs to none of {', '.join(lora.target_modules)}")
        partner = f"{match[1]}.lora_{'B' if match[3] == 'A' else 'A'}.weight"
        if partner not in shapes:
            raise CorruptArtifact(f"{file}: {name} is there without {partner}")
        if len(shape) != 2 or shape[0 if match[3] == "A" else 1] != lora.rank:
            raise CorruptArtifact(f"{file}: {name} has shape {shape}, which does not fit rank {lora.rank}")
