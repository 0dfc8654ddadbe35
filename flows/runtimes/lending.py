"""A model server whose machine shares nothing with the flow but the bucket: what passes between the two.

logs/serve/asked.request      what to serve; the server's run reads it when it starts
logs/serve/endpoint.json      where it listens, with its key; the flow takes it away
logs/serve/lent/<path>        a checkpoint that it must have; the server takes it away once it has it
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtimes.service import FOLDER
from steps.common import layout
from steps.common.artifacts import Checkpoint, Record, read_manifest
from steps.common.errors import ServerFault, StepFailed
from steps.common.runs import RunInUse
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteRun
from steps.remote.settings import BucketSettings
from steps.remote.transfer import Say, have, link_own_base
from steps.remote.upload import overwrite
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs

if TYPE_CHECKING:
    from flows.runtimes.by_bucket import Depot

ASKED, ENDPOINT, LENT = f"{FOLDER}/asked.request", f"{FOLDER}/endpoint.json", f"{FOLDER}/lent/"
LOOKS = 1.0
"""Seconds between two looks at the bucket."""
PATIENCE = 600.0
"""Seconds that a checkpoint may take to the server's machine."""


class ServeRequest(Record):
    """What a server is asked for."""

    inputs: ServeInputs
    needs: dict[str, str]
    """Digests of the artifacts that it loads, by path."""
    base_digest: str | None
    """Of the base model, where that is in a folder of each machine."""


class Lender:
    """The flow's side."""

    def __init__(self, depot: "Depot") -> None:
        self._depot, self._bucket = depot, depot.bucket

    def ask(self, inputs: ServeInputs) -> None:
        """Lays ready what a server needs to start."""
        first = read_manifest(self._depot.root / layout.checkpoint(0))
        request = ServeRequest(
            inputs=inputs,
            needs={layout.MODEL: self._depot.send(layout.MODEL).digest} if inputs.base_model == layout.MODEL else {},
            base_digest=first.inputs["base_digest"] if first and inputs.base_model == layout.BASE else None,
        )
        self._bucket.delete(self._depot.key(ENDPOINT))
        overwrite(self._bucket, self._depot.key(ASKED), request.model_dump_json().encode())

    def take_endpoint(self) -> None:
        """Has the server's endpoint here, where it is up, and only here."""
        if there := self._bucket.head(self._depot.key(ENDPOINT)):
            Endpoint.model_validate_json(self._bucket.read(there)).write(self._depot.root / ENDPOINT)
            for name in (ENDPOINT, ASKED):
                self._bucket.delete(self._depot.key(name))

    def lend(self, checkpoint: Checkpoint, alive: Callable[[], bool]) -> None:
        """Returns when the server's machine has the checkpoint. Raises `ServerFault` where it does not get there."""
        key = self._depot.key(f"{LENT}{checkpoint.path}")
        overwrite(self._bucket, key, self._depot.send(checkpoint.path).digest.encode())
        end = time.monotonic() + PATIENCE
        while self._bucket.head(key):
            if not alive():
                raise ServerFault(f"the model server ended before it had {checkpoint.path}")
            if time.monotonic() > end:
                raise ServerFault(f"the model server's machine has not fetched {checkpoint.path} in {PATIENCE:.0f} s")
            time.sleep(LOOKS)


class Borrower:
    """The server's side."""

    def __init__(self, place: str, root: Path, say: Say) -> None:
        self._bucket, self._root, self._say = Bucket(BucketSettings.at(place)), root, say

    def asked(self) -> ServeInputs:
        """What to serve; has here what that takes. Raises `StepFailed` where nobody asks any more."""
        there = self._bucket.head(self._key(ASKED))
        if there is None:
            raise StepFailed(f"there is no {self._key(ASKED)}: whoever asked for this server has given it up")
        request = ServeRequest.model_validate_json(self._bucket.read(there))
        self._root.mkdir(parents=True, exist_ok=True)
        have(self._bucket, self._root, request.needs, self._say)
        if request.base_digest:
            link_own_base(self._root, request.base_digest)
        return request.inputs

    def announce(self) -> None:
        """Tells the flow where the server is."""
        overwrite(self._bucket, self._key(ENDPOINT), (self._root / ENDPOINT).read_bytes())

    def look(self) -> None:
        """Fetches what was lent since the last time."""
        for found in RemoteRun(self._bucket, self._root.name, LENT.rstrip("/")).objects.values():
            path = found.key.removeprefix(self._key(LENT))
            try:
                have(self._bucket, self._root, {path: self._bucket.read(found).decode()}, self._say)
            except RunInUse:  # by a step that fetches what it needs: next time
                return
            self._bucket.delete(found.key)

    def _key(self, path: str) -> str:
        return self._bucket.settings.key(self._root.name, path)
