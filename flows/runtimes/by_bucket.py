"""The flow's side of steps whose machines share nothing with it but the bucket of the backups.

Artifacts have the places there that a backup gives them, put by the same `push` and got by the same `fetch`: what a
step made is backed up already, and a restore finds it. What a step is asked for is one object under the run's `logs`.
The key of the policy is in it, so it is deleted when the step has ended. Its log comes back beside it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from threading import Lock

from flows.runtimes.base import Say
from flows.runtimes.lending import Lender
from flows.runtimes.places import place_of
from steps.common import layout
from steps.common.artifacts import Checkpoint, Manifest, read_manifest
from steps.common.receipts import BACKUPS, ever_sent
from steps.common.step import Inputs
from steps.remote.bucket import Bucket
from steps.remote.inventory import PRUNED, RemoteRun
from steps.remote.push import conflict, name_of, owner_of, push, set_aside
from steps.remote.settings import BucketSettings
from steps.remote.transfer import LOG, REQUEST, Request, Wanted, letter
from steps.remote.upload import overwrite


class Depot:
    """A run's place in the bucket, as its flow uses it. Thread-safe."""

    def __init__(self, root: Path, settings: BucketSettings, at_work: Collection[str]) -> None:
        """`at_work`: what steps that an earlier flow has asked for are still making. Raises `InvalidInputs`."""
        self.root, self.bucket, self.place = root, Bucket(settings), settings.url()
        self.owner = name_of(root)
        self.lender = Lender(self)
        self._lock = Lock()
        self._asked = set(at_work)
        self._sweep({letter("train", path, "") for path in at_work})

    def handover(self, step: str, inputs: Inputs, path: str, say: Say) -> "BucketHandover":
        """For one attempt at a step."""
        return BucketHandover(self, step, inputs, path, say)

    def run(self, *folders: str) -> RemoteRun:
        """What the bucket holds of the run, or of some folders, now."""
        return RemoteRun(self.bucket, self.root.name, *folders)

    def key(self, path: str) -> str:
        """The object's key."""
        return self.bucket.settings.key(self.root.name, path)

    def stale(self, path: str) -> list[Manifest]:
        """What rewinds have set aside from a path: had it fitted, it would be back."""
        found = (read_manifest(aside / path) for aside in sorted((self.root / layout.SUPERSEDED).glob("*")))
        return [manifest for manifest in found if manifest]

    def make_room(self, wanted: Wanted) -> None:
        """Sets aside what is at the path and is not wanted there, with all that is not here any more either.

        That was made from it, before a rewind or a restore to an earlier iteration. Raises `BackupConflict` where it
        is another's.
        """
        with self._lock:
            self._asked.add(wanted.path)
            remote = self.run(wanted.path)
            if wanted.path not in remote.finished():
                self._delete_rest(remote, wanted.path)
            elif not wanted.found(remote):
                self._set_aside(wanted.path)

    def send(self, path: str) -> Manifest:
        """Has the run's artifact in the bucket. Raises `BackupConflict`, `CorruptArtifact`, `BucketFault`."""
        remote, manifest = self.run(path), read_manifest(self.root / path)
        if manifest and self._is_there(remote, path, manifest):
            return manifest
        return push(remote, self.root, path, self._ours(path))

    def _is_there(self, remote: RemoteRun, path: str, manifest: Manifest) -> bool:
        if path not in remote.finished() or remote.lacking(path, manifest) or manifest.pruned:
            return False
        head = self.bucket.head(remote.key(f"{path}/{layout.MANIFEST}"))
        return head is not None and head.metadata.get("digest") == manifest.digest

    def _set_aside(self, path: str) -> None:
        remote = self.run()
        follow = [
            other
            for other in remote.finished()
            if other.partition("/")[0] not in (layout.SUPERSEDED, BACKUPS)
            and other not in self._asked
            and read_manifest(self.root / other) is None
        ]
        for other in (path, *follow):
            there = remote.artifact(other)
            head = self.bucket.head(remote.key(f"{other}/{layout.MANIFEST}"))
            if (head and owner_of(head) == self.owner) or (other, there.manifest.digest) in self._ours(other):
                set_aside(remote, there)
            elif other == path:
                raise conflict(remote, self.root, path, head, there)

    def _delete_rest(self, remote: RemoteRun, path: str) -> None:
        """Files that an attempt which was killed had sent: nobody will finish them."""
        for name in [name for name in remote.objects if name != f"{path}/{PRUNED}"]:
            head = self.bucket.head(remote.key(name))
            if head and owner_of(head) == self.owner:
                self.bucket.delete(head.key)

    def _ours(self, path: str) -> set[tuple[str, str]]:
        sent = ever_sent(self.root, self.bucket.settings.url(self.root.name))
        return sent | {(path, manifest.digest) for manifest in self.stale(path)}

    def _sweep(self, kept: Collection[str]) -> None:
        """Deletes what a killed flow has laid ready."""
        for found in self.bucket.list(self.key(f"{layout.LOGS}/")):
            if found.key.rpartition(".")[0] not in {self.key(name) for name in kept}:
                self.bucket.delete(found.key)


class BucketHandover:
    """One attempt at a step."""

    def __init__(self, depot: Depot, step: str, inputs: Inputs, path: str, say: Say) -> None:
        self.log = depot.root / layout.log(step, path)
        self.missing = f"at {depot.place}/{depot.root.name}/{path}"
        self.parameters: Mapping[str, str] = {"place": depot.place}
        self._depot, self._step, self._inputs, self._path, self._say = depot, step, inputs, path, say
        self._wanted = Wanted(
            path=path, fingerprint=inputs.fingerprint(), stale=[manifest.started for manifest in depot.stale(path)]
        )

    def collect(self) -> None:
        if read_manifest(self._depot.root / self._path) is None:
            remote = self._depot.run(self._path)
            self._wanted.fetch(remote, self._depot.root)

    def offer(self, env: Mapping[str, str]) -> None:
        self._depot.make_room(self._wanted)
        base, digest = base_of(self._inputs) if place_of(self._step) == "train" else (None, None)
        request = Request(
            wanted=self._wanted,
            inputs=self._inputs.model_dump_json(indent=1),
            env=dict(env),
            needs={path: self._depot.send(path).digest for path in needed(self._step, self._inputs)},
            base_digest=digest if base == layout.BASE else None,
            owner=self._depot.owner,
        )
        overwrite(self._depot.bucket, self._key(REQUEST), request.model_dump_json().encode())

    def relay(self) -> None:
        """Its lines come when it has ended; until then Prefect shows them at its own flow run."""

    def clear(self) -> None:
        self._depot.bucket.delete(self._key(REQUEST))
        if said := self._depot.bucket.head(self._key(LOG)):
            content = self._depot.bucket.read(said)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                file.write(content)
            for line in content.decode(errors="replace").splitlines():
                self._say(line)
            self._depot.bucket.delete(said.key)

    def _key(self, kind: str) -> str:
        return self._depot.key(letter(self._step, self._path, kind))


def needed(step: str, inputs: Inputs) -> Iterator[str]:
    """Paths of the artifacts whose files a step reads: only who trains reads weights, others ask the model server."""
    trains = place_of(step) == "train"
    yield from (given.path for given in inputs.artifacts() if trains or not isinstance(given, Checkpoint))
    if trains and base_of(inputs)[0] == layout.MODEL:
        yield layout.MODEL


def base_of(inputs: Inputs) -> tuple[str | None, str | None]:
    """The base model that a step loads, and the digest of its contents."""
    for holder in (inputs, *inputs.artifacts()):
        if base := getattr(holder, "base_model", None):
            return base, getattr(holder, "base_digest", None)
    return None, None
