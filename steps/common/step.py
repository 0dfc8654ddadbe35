"""The step contract: a typed function from inputs to an artifact, done once, whole or not at all.

A step fills a hidden sibling of its folder; the manifest is written last and the folder renamed into place, so a
folder with a manifest is finished, whatever was killed when. Asked again with the same inputs, a step returns what is
there; with others, it refuses. That is the only mechanism of resumption: Prefect knows nothing of it.

A step runs the same in this process (`Step.run`) and as a command:

    python -m steps.group --root runs/demo --path iterations/0000/groups --inputs inputs.json

It exits 0 when the artifact is there, 202 when the inputs are wrong, and otherwise may be tried again. What differs
between attempts (endpoints, credentials) comes by environment variables, never by inputs.
"""

import argparse
import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Generic, Never, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from steps.common import layout
from steps.common.artifacts import (
    Artifact,
    Manifest,
    Record,
    check_files,
    describe_files,
    digest_of,
    read_manifest,
    refuse_pruned,
)
from steps.common.errors import CorruptArtifact, InvalidInputs, NightschoolError, StepFailed
from steps.common.storage import files_under, sync, write_atomically

RECORDED_PACKAGES = ("nightschool", "torch", "trl", "transformers", "peft", "polars", "duckdb", "vllm")


class Inputs(Record):
    """What a step needs. Every field changes the result, but for those named in `operational`."""

    operational: ClassVar[frozenset[str]] = frozenset()
    """Fields that change how a result is made and not what it is (timeouts, concurrency): not in the fingerprint."""

    def identity(self) -> dict[str, Any]:
        """The fields that decide the result, as JSON."""
        return self.model_dump(mode="json", exclude=set(self.operational))

    def fingerprint(self) -> str:
        """Hex sha256 of `identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def artifacts(self) -> Iterator[Artifact]:
        """Those that it is made from, by its own fields and lists of them."""
        for _, value in self:
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Artifact))


InputsT = TypeVar("InputsT", bound=Inputs)
ArtifactT = TypeVar("ArtifactT", bound=Artifact)


@dataclass
class Workspace:
    """Where a step works: it reads under `root`, writes under `out`, and its result appears at `root/path`."""

    root: Path
    path: str
    out: Path
    measured: dict[str, float] = field(default_factory=dict)
    """Speeds and the like, kept in the manifest beside the artifact."""


@dataclass(frozen=True)
class Step(Generic[InputsT, ArtifactT]):
    """A named step. `work` returns the artifact's own fields; its files are what it left in `Workspace.out`."""

    name: str
    inputs: type[InputsT]
    artifact: type[ArtifactT]
    work: Callable[[InputsT, Workspace], dict[str, Any]]
    tidy: Callable[[Path], object] = lambda folder: None
    """Removes what `work` kept beside the artifact's folder to survive a kill, once that folder is in place."""

    def finished(self, inputs: InputsT, root: Path, path: str) -> ArtifactT | None:
        """The artifact at `root/path`, or None where there is none yet.

        Raises `InvalidInputs` where it was made from other inputs, `CorruptArtifact` where it is damaged.
        """
        manifest = read_manifest(root / path)
        if manifest is None:
            return None
        if manifest.fingerprint != inputs.fingerprint():
            raise InvalidInputs(
                f"{root / path} was made from other inputs ({_differences(manifest.inputs, inputs.identity())}): "
                f"give the new settings another run name, or rewind this run to that step (`nightschool rewind`)"
            )
        if not manifest.pruned:
            check_files(root / path, manifest)
        return self._artifact(path, manifest)

    def run(self, inputs: InputsT, root: Path, path: str) -> ArtifactT:
        """Returns the artifact, making it where it is missing. Raises `PrunedArtifact` where its inputs are gone."""
        target = root / path
        if done := self.finished(inputs, root, path):
            self.tidy(target)
            return done
        for given in inputs.artifacts():
            refuse_pruned(root / given.path)
        out = _partial(target, uuid4().hex[:8])
        out.mkdir(parents=True)
        try:
            artifact = self._make(inputs, Workspace(root, path, out))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        self.tidy(target)
        return artifact

    def _make(self, inputs: InputsT, workspace: Workspace) -> ArtifactT:
        started, clock = datetime.now(UTC), time.monotonic()
        folder = workspace.out.stat()
        fields = self.work(inputs, workspace)
        if not os.path.samestat(folder, workspace.out.stat()):
            raise StepFailed(f"{workspace.path}: a rewind has set its folder aside while it was filled")
        for file in files_under(workspace.out):
            sync(file)
        files = describe_files(workspace.out)
        manifest = Manifest(
            step=self.name,
            fingerprint=inputs.fingerprint(),
            inputs=inputs.identity(),
            artifact=fields,
            digest=digest_of(files),
            files=files,
            versions=package_versions(),
            started=started,
            seconds=round(time.monotonic() - clock, 3),
            measured=workspace.measured,
        )
        artifact = self._artifact(workspace.path, manifest)
        write_atomically(workspace.out / layout.MANIFEST, manifest.model_dump_json(indent=1).encode())
        return self._publish(inputs, workspace, artifact)

    def _publish(self, inputs: InputsT, workspace: Workspace, artifact: ArtifactT) -> ArtifactT:
        target = workspace.root / workspace.path
        try:
            workspace.out.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another attempt was first: its artifact stands.
            if winner := self.finished(inputs, workspace.root, workspace.path):
                return winner
            raise InvalidInputs(f"{target} is in the way: it has no manifest; move it away") from None
        sync(target.parent)
        return artifact

    def _artifact(self, path: str, manifest: Manifest) -> ArtifactT:
        try:
            return self.artifact.model_validate({**manifest.artifact, "path": path, "digest": manifest.digest})
        except ValidationError as error:
            raise CorruptArtifact(f"{path}/{layout.MANIFEST} does not describe a {self.name}: {error}") from None

    def main(self, arguments: list[str] | None = None) -> Never:
        """Runs as a command and exits with the contract's status."""
        parser = argparse.ArgumentParser(
            prog=f"python -m steps.{self.name}", description=_first_line(self.work.__doc__)
        )
        parser.add_argument("--root", type=Path, required=True, help="the run's folder")
        parser.add_argument("--path", required=True, help="the artifact's folder, relative to the run's")
        parser.add_argument("--inputs", type=Path, required=True, help="a JSON file")
        given = parser.parse_args(arguments)
        sys.exit(exit_status_of(lambda: self.run(self.read_inputs(given.inputs), given.root, given.path)))

    def read_inputs(self, file: Path) -> InputsT:
        """Reads inputs from JSON. Raises `InvalidInputs`."""
        try:
            return self.inputs.model_validate_json(file.read_text())
        except FileNotFoundError:
            raise InvalidInputs(f"there is no inputs file {file}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidInputs(f"{file}: {where}: {first['msg']} (got {first['input']!r})") from None


def exit_status_of(work: Callable[[], object]) -> int:
    """Runs `work`; failures that one line explains become that line on stderr and a status, others propagate."""
    try:
        work()
    except NightschoolError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
            raise
        print(
            f"error: can't write {error.filename or 'the output'}: {os.strerror(error.errno)}",
            file=sys.stderr,
        )
        return 1
    return 0


def package_versions() -> dict[str, str]:
    """Versions of Python and of those recorded packages that this environment has."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def sweep_partials(root: Path, spare: Collection[str] = ()) -> list[Path]:
    """Removes what killed steps left half-filled under `root`; returns what it removed.

    Call it while no step runs, but for those that make the artifacts in `spare`.
    """
    spared = {partial for kept in spare for partial in partials_of(root / kept)}
    left = [path for path in root.rglob(f".*{layout.PARTIAL}") if path.is_dir() and path not in spared]
    for path in left:
        shutil.rmtree(path)
    return left


def clear(target: Path) -> None:
    """Removes what attempts at `target` that were killed left half-filled. Call it while none is at work."""
    for path in partials_of(target):
        shutil.rmtree(path, ignore_errors=True)


def partials_of(target: Path) -> list[Path]:
    """The folders that attempts at `target` fill, or were killed in."""
    return sorted(target.parent.glob(_partial(target, "*").name))


def _partial(target: Path, key: str) -> Path:
    """The folder that an attempt at `target` fills."""
    return target.with_name(f".{target.name}.{key}{layout.PARTIAL}")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    then, now = _flat(old), _flat(new)
    return "; ".join(
        f"{key}: {_short(then.get(key))} then, {_short(now.get(key))} now"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    )


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def _short(value: object, width: int = 60) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= width else text[: width - 1] + "…"


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]
