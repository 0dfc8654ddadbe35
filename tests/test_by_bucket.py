"""How a flow and machines that share only a bucket hand artifacts over in it, without Prefect."""

import os
from pathlib import Path
from typing import Any

import pytest
from s3_fixtures import BUCKET, Weed

from flows.runtimes.by_bucket import Depot
from flows.runtimes.pool import depot_of
from steps.common import layout
from steps.common.artifacts import Artifact
from steps.common.errors import InvalidInputs
from steps.common.models import digest_of_model
from steps.common.step import Inputs, Step, Workspace
from steps.remote.bucket import Bucket
from steps.remote.errors import BackupConflict
from steps.remote.settings import BucketSettings
from steps.remote.transfer import Request, Wanted, deliver, link_own_base


class Dice(Artifact):
    """Something that comes out otherwise each time."""


def roll(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    (workspace.out / "eyes").write_bytes(os.urandom(100))
    (workspace.out / "more").write_bytes(os.urandom(100))
    return {}


DICE = Step("dice", Inputs, Dice, roll)
WANTED = Wanted(path="odd/dice", fingerprint=Inputs().fingerprint(), stale=[])


def request(owner: str) -> Request:
    return Request(wanted=WANTED, inputs="{}", env={}, needs={}, base_digest=None, owner=owner)


def test_of_two_attempts_the_first_that_is_delivered_stands(place: BucketSettings, tmp_path: Path) -> None:
    bucket, roots = Bucket(place), [tmp_path / machine / "night" for machine in ("one", "two")]
    ours = Depot(tmp_path / "flow/night", place, at_work=())
    first, second = (DICE.run(Inputs(), root, WANTED.path) for root in roots)
    for root in roots:
        deliver(bucket, root, request(ours.owner))
    found = WANTED.found(ours.run(WANTED.path))
    assert found and found.manifest.digest == first.digest != second.digest
    ours.make_room(WANTED)  # it fits, and stays
    assert WANTED.found(ours.run(WANTED.path)) == found
    theirs = Depot(tmp_path / "theirs/night", place, at_work=())
    with pytest.raises(BackupConflict, match=r"odd/dice was put there by .*two machines"):
        theirs.make_room(WANTED.model_copy(update={"fingerprint": "other"}))


def test_what_killed_attempts_left_is_in_nobodys_way(weed: Weed, place: BucketSettings, tmp_path: Path) -> None:
    root = tmp_path / "one/night"
    ours = Depot(tmp_path / "flow/night", place, at_work=())
    by = {"by": "another/1", "for": ours.owner, "sha256": "0"}
    weed.client().put_object(Bucket=BUCKET, Key=place.key("night", "odd/dice/eyes"), Body=b"half", Metadata=by)
    for name in ("logs/dice/odd-dice.request", "logs/train/checkpoints-0001.request"):
        weed.client().put_object(Bucket=BUCKET, Key=place.key("night", name), Body=b"{}")
    after = Depot(tmp_path / "flow/night", place, at_work={"checkpoints/0001"})
    assert [path for path in after.run().objects if path.startswith("logs/")] == ["logs/train/checkpoints-0001.request"]
    after.make_room(WANTED)
    made = DICE.run(Inputs(), root, WANTED.path)
    deliver(Bucket(place), root, request(ours.owner))
    found = WANTED.found(ours.run(WANTED.path))
    assert found and found.manifest.digest == made.digest


def test_a_machine_needs_the_bucket_and_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKUP_BUCKET", raising=False)
    with pytest.raises(InvalidInputs, match=r"shared_disk = false needs a bucket: set BACKUP_BUCKET"):
        depot_of(tmp_path / "night", at_work=())
    model = tmp_path / "models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    root, digest = tmp_path / "night", digest_of_model(model)
    root.mkdir()
    with pytest.raises(InvalidInputs, match="NIGHTSCHOOL_BASE_MODEL is not set on"):
        link_own_base(root, digest)
    monkeypatch.setenv("NIGHTSCHOOL_BASE_MODEL", str(model))
    with pytest.raises(InvalidInputs, match=r"does not hold the run's base model .digest other"):
        link_own_base(root, "other")
    link_own_base(root, digest)
    assert (root / layout.BASE).resolve() == model
