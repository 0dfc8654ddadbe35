"""`nightschool export`: a checkpoint for others, made and uploaded in the train environment."""

from pathlib import Path

from flows.runtimes.places import run_alone, run_module
from steps.common.artifacts import Checkpoint, read_manifest
from steps.common.card import card_of
from steps.common.errors import InvalidInputs
from steps.common.models import is_on_hub
from steps.export import ExportInputs


def export(root: Path, checkpoint: Checkpoint, folder: Path, merge: bool, repo: str | None) -> int:
    """Writes a checkpoint to `folder`, uploads that where `repo` is given, and returns the exit status.

    Where that very export is in `folder` already, it is only uploaded. Raises `InvalidInputs` where something else is.
    """
    if repo and not is_on_hub(repo):
        raise InvalidInputs(f"--push {repo}: a repository on the hub is called OWNER/NAME")
    if repo and not merge and not is_on_hub(checkpoint.base_model):
        raise InvalidInputs(
            f"the base model of {root.name} is not on the hub: there an adapter without it is of no use, --merge them"
        )
    inputs = ExportInputs(checkpoint=checkpoint, merge=merge, card=card_of(root, checkpoint, merge))
    check_free(folder, inputs.fingerprint())
    status = run_alone("export", root, str(folder.absolute()), inputs.model_dump_json())
    if status or not repo:
        return status
    message = f"Checkpoint {checkpoint.iteration} of {root.name}"
    return run_module("publish", "--folder", folder, "--repo", repo, "--message", message)


def check_free(folder: Path, fingerprint: str) -> None:
    """Raises `InvalidInputs` where there is anything but an export of the same."""
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest and manifest.fingerprint == fingerprint:
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputs(f"{folder} is not empty: export to another folder, or empty it first")
