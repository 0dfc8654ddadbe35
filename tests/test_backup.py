"""Backup against a real S3 server: what travels, in which order, what a rewind and a second machine do to it."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from s3_fixtures import BUCKET, SECRET, Weed, make, make_run, remote, tree

from steps.backup import backup
from steps.common import layout
from steps.common.artifacts import read_manifest
from steps.common.backups import BackupSettings, TooManyFailures, backup_of, stop_where_too_many
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.receipts import covered
from steps.common.retention import Policy
from steps.common.rewind import Rewind, rewind
from steps.prune import backed_up, prune
from steps.remote import push, upload
from steps.remote.errors import BackupConflict
from steps.remote.settings import BucketSettings
from steps.restore import restore


def test_the_bucket_mirrors_the_run_and_only_what_is_new_travels(tmp_path: Path, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    said: list[str] = []
    receipt = backup(root, place, said.append)
    assert receipt and receipt.path == "backups/0000" and receipt.to == place.url("night")
    assert set(remote(place).objects) == set(tree(root))
    there = remote(place)
    assert all(there.bucket.read(there.objects[path]) == content for path, content in tree(root).items())
    assert len(said) == receipt.artifacts == 7

    assert backup(root, place, said.append) is None and len(said) == 7

    make(root, layout.checkpoint(2), 2)
    second = backup(root, place, said.append)
    assert second and second.path == "backups/0001" and len(said) == 8
    digests = {path: manifest.digest for path in covered(root) if (manifest := read_manifest(root / path))}
    assert covered(root, place.url("night")) == digests and len(digests) == 8
    assert covered(root, "s3://elsewhere/night") == {}


def test_a_large_file_travels_in_parts(tmp_path: Path, place: BucketSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART", 5 << 20)
    make(tmp_path / "night", layout.checkpoint(0), **{"adapter.bin": (12 << 20) + 7})
    backup(tmp_path / "night", place)
    found = remote(place).objects["checkpoints/0000/adapter.bin"]
    assert found.etag.endswith('-3"') and not remote(place).uploads()
    restore(place, "night", tmp_path / "empty/night")
    assert tree(tmp_path / "empty/night") == tree(tmp_path / "night")


def test_what_a_rewind_replaced_is_set_aside_in_the_bucket_too(tmp_path: Path, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=2)
    backup(root, place)
    old = read_manifest(root / layout.checkpoint(2))
    rewind(root, Rewind(iteration=1, step="train"))
    make(root, layout.checkpoint(2), seed=77)
    backup(root, place)
    there = remote(place)
    assert there.artifact(layout.checkpoint(2)).manifest == read_manifest(root / layout.checkpoint(2)) != old
    aside = [there.artifact(path) for path in there.finished() if path.startswith("superseded/")]
    paths = [artifact.path.partition("Z/")[2] for artifact in aside]
    assert sorted(paths) == ["checkpoints/0002", "evaluations/0002"]  # the second was made from the first
    assert old in [artifact.manifest for artifact in aside] and not any(artifact.lacking for artifact in aside)
    restore(place, "night", tmp_path / "empty/night")
    assert tree(tmp_path / "empty/night") == tree(root)


def test_the_bucket_gets_again_what_it_has_lost(tmp_path: Path, weed: Weed, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    backup(root, place)
    weed.client().delete_object(Bucket=BUCKET, Key=place.key("night", "checkpoints/0001/adapter.bin"))
    assert remote(place).artifact("checkpoints/0001").lacking == ("adapter.bin",)
    receipt = backup(root, place)
    assert receipt and receipt.artifacts == 1
    assert not any(artifact.lacking for artifact in remote(place).artifacts())


def test_what_was_pruned_in_the_bucket_is_not_sent_again(tmp_path: Path, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    backup(root, place)
    there = remote(place)
    there.delete(there.artifact("evaluations/0000"))
    assert backup(root, place) is None
    assert "evaluations/0000" not in remote(place).finished() and remote(place).is_pruned("evaluations/0000")
    restored = restore(place, "night", tmp_path / "empty/night")
    marked = read_manifest(tmp_path / "empty/night/evaluations/0000")
    assert restored.artifacts == 7 and marked and marked.pruned  # so that training goes on past it
    assert backup(tmp_path / "empty/night", place) is None


def test_what_was_pruned_here_comes_back_from_the_bucket(tmp_path: Path, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=3)
    backup(root, place)
    before = tree(root)
    goes = [
        verdict.path for verdict in prune(root, Policy(rollout_days=0), backed_up(root), len, False) if verdict.goes
    ]
    assert goes and set(tree(root)) < set(before)
    assert backup(root, place) is None
    assert restore(place, "night", root).artifacts == len(goes)
    assert tree(root) == before


def test_a_run_that_was_pruned_before_its_first_backup_is_restored_as_it_is(
    tmp_path: Path, place: BucketSettings
) -> None:
    root = make_run(tmp_path / "night", checkpoints=3)
    prune(root, Policy(rollout_days=0), None, len, False)
    backup(root, place)
    restore(place, "night", tmp_path / "empty/night")
    assert tree(tmp_path / "empty/night") == tree(root)


def test_a_damaged_file_is_not_backed_up(tmp_path: Path, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    file = root / "checkpoints/0001/adapter.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptArtifact, match=r"adapter\.bin differs from its manifest, and was not backed up"):
        backup(root, place)
    assert "checkpoints/0001" not in remote(place).finished()


def test_another_machine_that_comes_later_is_told_whose_run_it_is(tmp_path: Path, place: BucketSettings) -> None:
    backup(make_run(tmp_path / "a/night"), place)
    theirs = tree(tmp_path / "a/night")
    with pytest.raises(BackupConflict) as conflict:
        backup(make_run(tmp_path / "b/night", seed=5), place)
    assert "/night/checkpoints/0000 was put there by " in str(conflict.value) and "BACKUP_PREFIX" in str(conflict.value)
    restore(place, "night", tmp_path / "c/night")
    assert tree(tmp_path / "c/night") == theirs


def test_what_another_machine_left_half_sent_gives_way_once_it_is_old(
    tmp_path: Path, weed: Weed, place: BucketSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    key = place.key("night", "checkpoints/0001/adapter.bin")
    weed.client().put_object(Bucket=BUCKET, Key=key, Body=b"half", Metadata={"by": "desk/1", "sha256": "0"})
    with pytest.raises(BackupConflict, match="checkpoints/0001 was being sent there by desk/1 on "):
        backup(root, place)
    monkeypatch.setattr(push, "STALE", timedelta())
    backup(root, place)
    restore(place, "night", tmp_path / "empty/night")
    assert tree(tmp_path / "empty/night") == tree(root)


def command(step: str, root: Path, *arguments: str, **env: str) -> "subprocess.Popen[str]":
    """A step in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"steps.{step}", "--root", root, *arguments],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3))
def test_of_two_machines_at_once_one_wins_and_the_other_is_told(
    tmp_path: Path, place: BucketSettings, first: int
) -> None:
    roots = [make_run(tmp_path / machine / "night", seed=seed) for machine, seed in (("a", 0), ("b", 100))]
    processes = [command("backup", root) for root in roots]
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    (winner,) = [root for root, (_, status) in zip(roots, ends, strict=True) if status == 0]
    ((error, status),) = [end for end in ends if end[1] != 0]
    assert status == 202 and error.startswith("error: s3://") and len(error.splitlines()) == 1
    restore(place, "night", tmp_path / "c/night")
    assert tree(tmp_path / "c/night") == tree(winner)


def test_two_machines_with_the_same_run_agree(tmp_path: Path, place: BucketSettings) -> None:
    backup(make_run(tmp_path / "a/night"), place)
    restore(place, "night", tmp_path / "b/night")
    for machine in ("a", "b"):
        make(tmp_path / machine / "night", layout.checkpoint(4), 4)
        receipt = backup(tmp_path / machine / "night", place)
        assert receipt and receipt.path == "backups/0001" and receipt.artifacts == 1


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKUP_BUCKET", raising=False)
    assert BucketSettings.from_environment() is None
    monkeypatch.setenv("BACKUP_BUCKET", "here")
    monkeypatch.setenv("BACKUP_PREFIX", "/a/b/")
    monkeypatch.setenv("BACKUP_ENCRYPTION", "aws:kms:key-1")
    monkeypatch.setenv("BACKUP_STORAGE_CLASS", "STANDARD_IA")
    settings = BucketSettings.from_environment()
    assert (
        settings and settings.key("night", "run.json") == "a/b/night/run.json" and settings.key("night") == "a/b/night/"
    )
    assert settings.put_options() == {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "key-1",
        "StorageClass": "STANDARD_IA",
    }
    assert BucketSettings.at("s3://there").url("night") == "s3://there/night"
    assert BucketSettings.at("s3://there").key("night") == "night/"
    monkeypatch.setenv("BACKUP_PATH_STYLE", "both")
    with pytest.raises(InvalidInputs, match="BACKUP_PATH_STYLE = 'both'"):
        BucketSettings.from_environment()
    with pytest.raises(InvalidInputs, match="write s3://bucket/prefix"):
        BucketSettings.at("there")


@pytest.mark.slow
def test_no_secret_is_left_anywhere(tmp_path: Path, weed: Weed, place: BucketSettings) -> None:
    """In no file, object, metadata or output of a backup and a restore, those that fail included."""
    root = make_run(tmp_path / "night", checkpoints=1)
    output: list[Any] = []
    for step, folder, env in (
        ("backup", root, {}),
        ("restore", tmp_path / "empty/night", {}),
        ("backup", root, {"AWS_SECRET_ACCESS_KEY": f"wrong-{SECRET}"}),
        ("backup", root, {"BACKUP_BUCKET": "elsewhere"}),
    ):
        output.append(command(step, folder, **env).communicate(timeout=60))
    objects = weed.client().list_objects_v2(Bucket=BUCKET, Prefix=place.key("night"))["Contents"]
    heads = [weed.client().head_object(Bucket=BUCKET, Key=found["Key"])["Metadata"] for found in objects]
    assert SECRET not in json.dumps([output, heads, [found["Key"] for found in objects]])
    everything = [*tmp_path.rglob("*"), *(Path.cwd() / "runs").glob("*/logs/**/*")]
    assert not [path for path in everything if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert SECRET in weed.client()._request_signer._credentials.secret_key  # what is looked for is what signs


def test_failures_are_counted_in_a_row_and_too_many_stop_the_run(tmp_path: Path, place: BucketSettings) -> None:
    root, settings = make_run(tmp_path / "night", 1), BackupSettings(stop_after_failures=2)
    nowhere = place.model_copy(update={"bucket": "no-such-bucket"})
    for count in (1, 2):
        stop_where_too_many(root, settings)
        with pytest.raises(InvalidInputs):
            backup(root, nowhere)
        standing = backup_of(root)
        assert standing and standing.failures == count and "no-such-bucket" in (standing.reason or "")
    with pytest.raises(TooManyFailures, match=r"2 backups in a row failed.*no-such-bucket.*stop_after_failures"):
        stop_where_too_many(root, settings)
    backup(root, place)
    stop_where_too_many(root, settings)
    standing = backup_of(root)
    assert standing and (standing.to, standing.artifacts, standing.missing) == (place.url("night"), 7, 0)
