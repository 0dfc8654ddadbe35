"""Restore, and looking at what is in a bucket, against a real S3 server; by functions, commands and the flow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from s3_fixtures import BUCKET, Weed, make, make_run, tree

from flows import restore as flow
from steps.backup import backup
from steps.common.artifacts import verify
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.receipts import covered
from steps.common.runs import RunInUse, locked
from steps.common.status import damages
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteRun
from steps.remote.settings import BucketSettings
from steps.restore import restore

NIGHTSCHOOL = Path(sys.executable).parent / "nightschool"


def nightschool(*arguments: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([NIGHTSCHOOL, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def root(tmp_path: Path, place: BucketSettings) -> Path:
    """A run that was backed up."""
    root = make_run(tmp_path / "here/night", checkpoints=3)
    backup(root, place)
    return root


def test_a_run_is_rebuilt_from_manifests_alone(tmp_path: Path, root: Path, place: BucketSettings) -> None:
    there = tmp_path / "empty/night"
    said: list[str] = []
    restored = restore(place, "night", there, say=said.append)
    assert tree(there) == tree(root) and restored.artifacts == len(said) and restored.here == 0
    assert all(damage is None for _, damage in damages(there))
    assert covered(there) == covered(root)  # the receipts are true there as well
    assert backup(there, place) is None
    again = restore(place, "night", there, say=said.append)
    assert (again.artifacts, again.here, len(said)) == (0, restored.artifacts, restored.artifacts)


def test_an_iteration_comes_with_what_training_needs_to_go_on(
    tmp_path: Path, root: Path, place: BucketSettings
) -> None:
    restore(place, "night", tmp_path / "empty/night", iteration=1)
    found = {path.rpartition("/")[0] for path in tree(tmp_path / "empty/night", "backups") if "manifest" in path}
    assert found == {
        "model",
        "checkpoints/0000",
        "checkpoints/0001",
        "evaluations/0000",
        "evaluations/0001",
        "iterations/0000/groups",
        "iterations/0000/rollouts/000",
    }
    with pytest.raises(InvalidInputs, match="has no checkpoint 7: there are 0000, 0001, 0002, 0003"):
        restore(place, "night", tmp_path / "other/night", iteration=7)
    restore(place, "night", tmp_path / "only/night", only="checkpoints")
    assert not (tmp_path / "only/night/iterations").exists() and (tmp_path / "only/night/run.json").exists()
    assert verify(tmp_path / "only/night/checkpoints/0003")


def test_what_was_made_anew_after_a_restore_to_an_iteration_takes_the_place_of_what_was(
    tmp_path: Path, root: Path, place: BucketSettings
) -> None:
    there = tmp_path / "empty/night"
    restore(place, "night", there, iteration=1)
    make(there, "checkpoints/0002", seed=50)
    receipt = backup(there, place)
    assert receipt and receipt.artifacts == 1
    aside = [path for path in RemoteRun(Bucket(place), "night").finished() if path.startswith("superseded/")]
    assert {path.partition("Z/")[2].rpartition("/")[0] for path in aside} >= {"checkpoints", "evaluations"}
    restore(place, "night", tmp_path / "again/night")
    assert tree(tmp_path / "again/night") == tree(there)


def test_what_is_there_is_kept_and_what_is_another_refused(tmp_path: Path, root: Path, place: BucketSettings) -> None:
    there = tmp_path / "other/night"
    make(there, "checkpoints/0001", seed=99)
    with pytest.raises(InvalidInputs) as error:
        restore(place, "night", there)
    assert f"{there}/checkpoints/0001 is another than {place.url('night')}/checkpoints/0001" in str(error.value)
    assert not (there / "run.json").exists()

    whole = tmp_path / "damaged/night"
    restore(place, "night", whole)
    (whole / "checkpoints/0001/adapter.bin").write_bytes(bytes(3000))
    with pytest.raises(CorruptArtifact, match="checkpoints/0001 is damaged: move it away"):
        restore(place, "night", whole)
    (whole / "checkpoints/0001").rename(tmp_path / "away")
    assert restore(place, "night", whole).artifacts == 1
    with locked(whole), pytest.raises(RunInUse):
        restore(place, "night", whole)


def test_commands_back_up_list_verify_and_restore(tmp_path: Path, weed: Weed, place: BucketSettings) -> None:
    root = make_run(tmp_path / "here/night", checkpoints=1)
    here, empty = {"NIGHTSCHOOL_RUNS": str(root.parent)}, {"NIGHTSCHOOL_RUNS": str(tmp_path / "empty")}
    assert nightschool("backup", "night", **here).stdout.endswith(f"sent 7 artifacts to {place.url('night')}\n")
    assert nightschool("backup", "night", **here).stdout == "nothing was new\n"
    client = weed.client()
    client.put_object(Bucket=BUCKET, Key=place.key("night", "checkpoints/0002/adapter.bin"), Body=b"half")
    client.create_multipart_upload(Bucket=BUCKET, Key=place.key("night", "checkpoints/0002/optimizer.bin"))

    assert "night" in nightschool("backups").stdout
    listed = nightschool("backups", "night").stdout
    assert "8 of 8 artifacts are whole, 2 unfinished" in listed and "without a manifest" in listed
    assert "half uploaded" in listed and "checkpoints/0001" in listed
    assert nightschool("verify", "--remote", "night", **empty).stdout == "8 of 8 artifacts are whole\n"
    assert nightschool("verify", "--remote", "--deep", "night", **here).stdout == "8 of 8 artifacts are whole\n"

    planned = nightschool("restore", "night", "--dry-run", **empty).stdout
    assert "checkpoints/0001: " in planned and "would bring 8 artifacts" in planned
    assert not (tmp_path / "empty").exists()
    done = nightschool("restore", "night", "--iteration", "latest", "--from", place.url(), **empty, BACKUP_BUCKET="")
    assert done.stdout.splitlines()[-1].startswith("brought 8 artifacts, ") and not done.stderr
    assert tree(tmp_path / "empty/night") == tree(root)

    make(root, "checkpoints/0002", seed=2)
    late = nightschool("verify", "--remote", "night", **here)
    assert late.stderr == f"{root}/checkpoints/0002 is not in {place.url('night')}\n" and late.returncode == 1


@pytest.mark.parametrize(
    "command, message",
    [
        ("restore nowhere", "there is no run 'nowhere' in s3://"),
        ("backups nowhere", "there is no run 'nowhere' in s3://"),
        ("verify --remote nowhere", "there is no run 'nowhere' in s3://"),
        ("verify --deep nowhere", "--deep goes with --remote"),
        ("restore night --iteration last", "--iteration last: give a checkpoint's number, or latest"),
        ("restore night --from bucket/prefix", "'bucket/prefix' is no place in a bucket"),
    ],
)
def test_a_mistake_is_one_line(place: BucketSettings, command: str, message: str) -> None:
    done = nightschool(*command.split())
    assert done.returncode == 202 and len(done.stderr.splitlines()) == 1 and message in done.stderr


def test_without_a_bucket_it_says_so(place: BucketSettings) -> None:
    done = nightschool("backups", BACKUP_BUCKET="")
    assert (done.returncode, done.stderr.startswith("error: BACKUP_BUCKET is not set")) == (202, True)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_flow_restores(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSCHOOL_RUNS", str(tmp_path / "empty"))
    restored = flow.restore("night")
    assert tree(tmp_path / "empty/night") == tree(root) and restored.artifacts > 10
