"""The base model, its tokenizer, and the machine they run on; what can't be loaded is explained in one line."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from steps.common.errors import InvalidInputs
from steps.common.models import find_model
from steps.common.settings import Dtype

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prepare_torch() -> None:
    """Threads as OMP_NUM_THREADS says (torch reads it at import, which may have been in another process); quiet logs.

    Without it: one. A tiny model gains little by more, and results are the same bit for bit on every machine.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def trainer_arguments(dtype: Dtype) -> dict[str, Any]:
    """What our trainers tell transformers alike: where to compute, and to log, save and skip nothing by itself."""
    return {
        "bf16": dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,
        "ignore_data_skip": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def leave_unless_first() -> None:
    """Of several ranks the first writes the checkpoint; the work of the others ends here, successfully."""
    state = PartialState()
    if state.num_processes == 1:
        return
    state.wait_for_everyone()
    state.destroy_process_group()
    if not state.is_main_process:
        raise SystemExit(0)


def load_base(root: Path, base_model: str, dtype: Dtype) -> PreTrainedModel:
    """The base model in `dtype`, on the CPU. Raises `InvalidInputs` where there is none, with what to do."""
    where = _located(root, base_model)
    try:
        return AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[dtype])
    except (OSError, ValueError) as error:
        raise InvalidInputs(f"{where} is not a model that transformers can load ({_first_line(error)})") from None


def load_tokenizer(root: Path, base_model: str) -> PreTrainedTokenizerBase:
    """The base model's tokenizer. Raises `InvalidInputs`."""
    where = _located(root, base_model)
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise InvalidInputs(f"{where} has no tokenizer that transformers can load ({_first_line(error)})") from None


def _located(root: Path, base_model: str) -> str:
    where = find_model(root, base_model)
    if not Path(where).is_dir():
        _check_hub(where)
    return where


def _check_hub(name: str) -> None:
    """Asks for the model's config.json, from the cache or the hub, to learn what is wrong if something is."""
    try:
        hf_hub_download(name, "config.json")
    except GatedRepoError:
        token = "the account of HF_TOKEN was not given access" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
        raise InvalidInputs(f"{name} is gated and {token}: accept its terms on its page, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise InvalidInputs(
            f"the hub has no model {name}, or it is private: correct base_model, or set HF_TOKEN to one that may see it"
        ) from None
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise InvalidInputs(
                f"{name} is neither a folder nor in the hub's cache, and the hub can't be reached: "
                f"set base_model to a folder that holds the model, or download it where there is a connection"
            ) from None
        raise InvalidInputs(f"{name} is on the hub but has no config.json: it is no model for transformers") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
