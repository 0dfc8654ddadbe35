"""Step `fork`: copies a checkpoint of another run, for a new one to start from. Makes the artifact `origin`.

The new run's checkpoint 0 is made from it by `initialize` (or `sft`), so that a fork is a run like any other: it has a
probe, and its KL is to what its origin's is to, not to the origin. Its iterations start at 0, and with them the order
of the tasks and the schedule of the learning rate; with the optimizer, the steps taken go on counting.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from re import fullmatch
from typing import Any, ClassVar

from steps.common import layout
from steps.common.artifacts import Checkpoint, Manifest, check_files, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.models import PROBE
from steps.common.origin import Origin
from steps.common.runs import NAME, RunRecord, locked, read_record, runs_folder, write_record
from steps.common.settings import LoraSettings
from steps.common.step import Inputs, Step, Workspace, package_versions
from steps.common.storage import sha256_of, sync
from steps.remote.settings import BucketSettings

CONFIG = "adapter_config.json"
POLICY = frozenset({CONFIG, "adapter_model.safetensors", PROBE})
"""What plays. The rest of a checkpoint is for the optimizer to go on, but for what the KL is to."""
REFERENCE = "reference/"
"""Begins the names of what the KL is to, where that is not the base model."""


class ForkInputs(Inputs):
    """Which checkpoint of which run."""

    operational: ClassVar[frozenset[str]] = frozenset({"folder"})
    run: str
    iteration: int
    with_optimizer: bool = True
    source: str
    """Where the run is: a folder, or an address in S3."""
    folder: Path
    """Where it is read: the run's folder, or what was fetched of it."""


def fork(inputs: ForkInputs, workspace: Workspace) -> dict[str, Any]:
    """Copies a checkpoint of another run, with or without what its optimizer needs; checks every file."""
    path = layout.checkpoint(inputs.iteration)
    manifest = _finished(inputs.folder / path)
    names = [name for name in manifest.files if inputs.with_optimizer or name in POLICY or name.startswith(REFERENCE)]
    _copy(inputs.folder / path, workspace.out, manifest, names)
    checkpoint = Checkpoint.model_validate({**manifest.artifact, "path": path, "digest": manifest.digest})
    learnt = read_record(inputs.folder).config.get("sft")
    return {
        "run": inputs.run,
        "checkpoint": checkpoint.model_dump(mode="json"),
        "lora": _lora_of(workspace.out / CONFIG).model_dump(mode="json"),
        "with_optimizer": inputs.with_optimizer,
        **({"sft": learnt} if learnt else {}),
    }


FORK = Step("fork", ForkInputs, Origin, fork)


def make_run(inputs: ForkInputs, name: str) -> Path:
    """Makes a run that starts from a checkpoint, with the settings of its origin; returns its folder.

    It appears whole or not at all. Raises `InvalidInputs` where there is a run of that name, or no such checkpoint, and
    `CorruptArtifact`.
    """
    new = _free(name)
    aside = new.with_name(f".{name}.fork{layout.PARTIAL}")
    with locked(aside):
        _clear(aside)
        origin = FORK.run(inputs, aside, layout.ORIGIN)
        _take_base_along(inputs.folder, origin.checkpoint.base_model, aside)
        config = read_record(inputs.folder).config | {"name": name}
        write_record(aside, RunRecord(config=config, versions=package_versions()))
        aside.rename(new)
    sync(new.parent)
    return new


def make_run_from_bucket(settings: BucketSettings, run: str, iteration: int, with_optimizer: bool, name: str) -> Path:
    """`make_run` from a backup: brings no more of it than it needs, and keeps what has come where it is interrupted.

    Raises `BucketFault` too.
    """
    from steps.remote.origin import fetch_origin  # and with it boto3

    folder = _free(name).with_name(f".{name}.fetched{layout.PARTIAL}")
    with locked(folder):
        source = fetch_origin(settings, run, iteration, folder)
        inputs = ForkInputs(run=run, iteration=iteration, with_optimizer=with_optimizer, source=source, folder=folder)
        new = make_run(inputs, name)
        shutil.rmtree(folder)
    return new


def _free(name: str) -> Path:
    """The folder of a run that is to be. Raises `InvalidInputs` where there is one."""
    new = runs_folder() / name
    if not fullmatch(NAME, name) or new.exists():
        raise InvalidInputs(f"{new} {'is there already' if new.exists() else 'is no name'}: give the fork another name")
    return new


def _take_base_along(source: Path, base_model: str, target: Path) -> None:
    """A base model that the run made is copied. One in a folder is linked to, where that is known here."""
    if base_model == layout.MODEL:
        folder = target / layout.MODEL
        manifest = _finished(source / layout.MODEL)
        folder.mkdir()
        _copy(source / layout.MODEL, folder, manifest, manifest.files)
        shutil.copyfile(source / layout.MODEL / layout.MANIFEST, folder / layout.MANIFEST)
        sync(folder / layout.MANIFEST)
    elif base_model == layout.BASE and (source / layout.BASE).is_symlink():
        (target / layout.BASE).symlink_to((source / layout.BASE).readlink())


def _finished(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if manifest is None:
        raise InvalidInputs(f"there is no {folder}, or it was never finished")
    check_files(folder, manifest)
    return manifest


def _copy(source: Path, target: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises `CorruptArtifact` for a file that is not as its manifest says."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
        if sha256_of(target / name) != manifest.files[name].sha256:
            raise CorruptArtifact(f"{source / name} differs from its manifest; restore {source} from a backup")
        sync(target / name)


def _lora_of(file: Path) -> LoraSettings:
    """As the adapter's config in PEFT's format has it."""
    config = json.loads(file.read_text())
    return LoraSettings(rank=config["r"], alpha=config["lora_alpha"], target_modules=config["target_modules"])


def _clear(folder: Path) -> None:
    """Removes what an attempt that was killed has left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != layout.LOCK:
            path.unlink()


if __name__ == "__main__":
    FORK.main()
