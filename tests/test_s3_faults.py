"""What goes wrong between a run and its bucket: nothing is lost or half-visible, and the same command ends it."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from s3_fixtures import BUCKET, KEY, SECRET, Proxy, Weed, make, make_run, remote, says, tree

from steps.backup import backup
from steps.common.artifacts import verify
from steps.common.errors import InvalidInputs, NightschoolError
from steps.remote import bucket as bucket_module
from steps.remote import fetch, inventory, upload
from steps.remote.compare import remote_damages
from steps.remote.errors import BucketFault
from steps.remote.settings import BucketSettings
from steps.restore import restore

PART = 5 << 20


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives up soon, and sends small parts."""
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 3)
    monkeypatch.setattr(bucket_module, "READ", 2.0)
    monkeypatch.setattr(upload, "PART", PART)


def large(root: Path) -> Path:
    """A run with a file that travels in three parts."""
    make(root, "checkpoints/0000", **{"adapter.bin": 3 * PART - 11, "rest.bin": 10})
    return root


def is_part(request: web.Request, number: int) -> bool:
    return request.method == "PUT" and request.query.get("partNumber") == str(number)


def complete(root: Path, place: BucketSettings, tmp_path: Path) -> None:
    """The same command ends it: all is in the bucket, and comes back as it was."""
    backup(root, place)
    assert not any(damage for _, damage in remote_damages(remote(place), deep=True))
    restore(place, "night", tmp_path / "whole/night")
    assert tree(tmp_path / "whole/night") == tree(root)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_the_server_is_killed_in_the_middle_of_an_upload(
    tmp_path: Path, place: BucketSettings, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Weed(tmp_path / "weed")
    own.start()
    try:
        proxy.upstream = own.url

        async def kill(request: web.Request) -> None:
            if is_part(request, 2):
                own.kill()

        proxy.trouble = kill  # a proxy without a server answers 500
        root = large(tmp_path / "night")
        with pytest.raises(BucketFault, match="does not work"):
            backup(root, place)
        proxy.trouble = None
        own.start()
        assert remote(place).finished() == []
        complete(root, place, tmp_path)
        monkeypatch.setattr(inventory, "STALE", timedelta())
        remote(place).clear_uploads()
        assert remote(place).uploads() == []
    finally:
        own.kill()


@pytest.mark.usefixtures("hasty")
def test_a_connection_that_drops_in_the_middle_of_an_upload_costs_one_part(
    tmp_path: Path, place: BucketSettings, proxy: Proxy
) -> None:
    dropped: list[str] = []

    async def drop(request: web.Request) -> None:
        if is_part(request, 2) and not dropped:
            dropped.append(request.path)
            assert request.transport
            request.transport.close()

    proxy.trouble = drop
    root = large(tmp_path / "night")
    complete(root, place, tmp_path)
    sent = [line for line in proxy.seen if "partNumber" in line]
    assert dropped and sorted(line.partition("partNumber=")[2][0] for line in sent) == ["1", "2", "2", "3"]


@pytest.mark.usefixtures("hasty")
def test_a_part_that_fails_for_good_leaves_no_parts(tmp_path: Path, place: BucketSettings, proxy: Proxy) -> None:
    async def refuse(request: web.Request) -> web.Response | None:
        return says(503, "SlowDown") if is_part(request, 2) else None

    proxy.trouble = refuse
    with pytest.raises(BucketFault, match="SlowDown"):
        backup(large(tmp_path / "night"), place)
    assert remote(place).uploads() == [] and remote(place).objects == {}


@pytest.mark.slow
def test_throttling_and_latency_only_take_time(tmp_path: Path, place: BucketSettings, proxy: Proxy) -> None:
    random = Random(1)

    async def throttle(request: web.Request) -> web.Response | None:
        await asyncio.sleep(0.05)
        return says(503, "SlowDown") if random.random() < 0.15 else None

    proxy.trouble = throttle
    complete(make_run(tmp_path / "night", checkpoints=1), place, tmp_path)


@pytest.mark.usefixtures("hasty")
def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, place: BucketSettings, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "READ", 0.3)

    async def sleep(request: web.Request) -> None:
        await asyncio.sleep(20)

    proxy.trouble = sleep
    began = time.monotonic()
    with pytest.raises(BucketFault, match="ReadTimeoutError"):
        backup(make_run(tmp_path / "night", checkpoints=1), place)
    assert time.monotonic() - began < 15
    proxy.trouble = None


def test_wrong_keys_and_buckets_are_said_in_one_line(
    tmp_path: Path, weed: Weed, place: BucketSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    nowhere = place.model_copy(update={"bucket": "no-such-bucket"})
    for work in (lambda: backup(root, nowhere), lambda: restore(nowhere, "night", tmp_path / "empty/night")):
        with pytest.raises(InvalidInputs, match="there is no bucket no-such-bucket at 127"):
            work()
    assert [found["Name"] for found in weed.client().list_buckets()["Buckets"]] == [BUCKET]

    for name, value, code in (
        ("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "wrong", "InvalidAccessKeyId"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(InvalidInputs, match=rf"refuses these credentials \({code}\)"):
            backup(root, place)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidInputs, match="there are no credentials for s3://backup"):
        backup(root, place)


def test_credentials_that_expire_are_looked_for_anew(
    tmp_path: Path, place: BucketSettings, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS' own never do: the proxy answers as Amazon does once some have."""
    file, refused = tmp_path / "credentials", []
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

    async def expire(request: web.Request) -> web.Response | None:
        if f"Credential={KEY}/" in request.headers["Authorization"] and len(proxy.seen) < 8:
            return None
        refused.append(request.path)
        if "PUT" in request.method:
            write(KEY)  # somebody has logged in again
            proxy.trouble = None
        return says(400, "ExpiredToken")

    write(KEY)
    proxy.trouble = expire
    root = make_run(tmp_path / "night", checkpoints=1)
    complete(root, place, tmp_path)
    assert refused

    async def always(request: web.Request) -> web.Response:
        return says(400, "ExpiredToken")

    proxy.trouble = always
    with pytest.raises(BucketFault, match=r"the credentials for s3://backup.* have expired: renew them") as error:
        backup(root, place)
    assert SECRET not in str(error.value)


@pytest.mark.usefixtures("hasty")
def test_bytes_that_arrive_otherwise_than_they_were_stored_are_fetched_again(
    tmp_path: Path, place: BucketSettings, proxy: Proxy
) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    backup(root, place)
    proxy.flip = "checkpoints/0001/nested/optimizer.bin"
    proxy.cut = "checkpoints/0001/adapter.bin"
    proxy.stall = "checkpoints/0000/adapter.bin"
    restore(place, "night", tmp_path / "empty/night")
    assert (proxy.flip, proxy.cut, proxy.stall) == (None, None, None)
    assert tree(tmp_path / "empty/night") == tree(root)


@pytest.mark.parametrize(
    "damage, found",
    [
        ("truncated", "lacks adapter.bin"),
        ("flipped", "checkpoints/0001/adapter.bin is damaged, its sha256 is not what"),
        ("missing", "lacks adapter.bin"),
        ("manifest", "manifest.json is damaged|manifest that can't be read"),
    ],
)
def test_what_is_damaged_in_the_bucket_is_named_and_never_becomes_visible(
    tmp_path: Path, weed: Weed, place: BucketSettings, damage: str, found: str
) -> None:
    root = make_run(tmp_path / "night", checkpoints=1)
    backup(root, place)
    client, name = weed.client(), "manifest.json" if damage == "manifest" else "adapter.bin"
    key = place.key("night", f"checkpoints/0001/{name}")
    head = client.get_object(Bucket=BUCKET, Key=key)
    body = head["Body"].read()
    if damage == "missing":
        client.delete_object(Bucket=BUCKET, Key=key)
    else:
        changed = body[:-9] if damage == "truncated" else body.replace(body[50:51], bytes([body[50] ^ 1]), 1)
        client.put_object(Bucket=BUCKET, Key=key, Body=changed, Metadata=head["Metadata"])

    empty = tmp_path / "empty/night"
    with pytest.raises(InvalidInputs, match=found):
        restore(place, "night", empty)
    assert not (empty / "checkpoints/0001").exists() and not (empty / "run.json").exists()
    wrong = {path for path, wrong in remote_damages(remote(place), deep=True) if wrong}
    assert wrong == {"checkpoints/0001"}
    if damage in ("truncated", "missing"):
        complete(root, place, tmp_path)  # the machine that has it sends it again


def test_files_without_a_manifest_are_not_there(tmp_path: Path, weed: Weed, place: BucketSettings) -> None:
    root = make_run(tmp_path / "night", checkpoints=2)
    backup(root, place)
    weed.client().delete_object(Bucket=BUCKET, Key=place.key("night", "checkpoints/0002/manifest.json"))
    assert {left.path for left in remote(place).unfinished()} == {"checkpoints/0002", "checkpoints/0002/nested"}
    restore(place, "night", tmp_path / "empty/night")
    assert not (tmp_path / "empty/night/checkpoints/0002").exists()
    complete(root, place, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True, timeout=10
        ).returncode
    ):
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=10)


def test_a_full_disk_is_said_and_leaves_nothing_visible(
    tmp_path: Path, place: BucketSettings, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(make_run(tmp_path / "night", checkpoints=1), place)
    with pytest.raises(NightschoolError, match=r"needs [0-9,]+ bytes, and its disk has [0-9,]+: free some"):
        restore(place, "night", small_disk / "night")
    assert tree(small_disk) == {}
    # As if another process filled the disk meanwhile.
    monkeypatch.setattr(fetch, "free_space", lambda root: 1 << 40)
    with pytest.raises(NightschoolError, match=rf"the disk of {small_disk}/night is full: free some"):
        restore(place, "night", small_disk / "night")
    visible = {path.rpartition("/")[0] for path in tree(small_disk) if "manifest.json" in path}
    assert all(verify(small_disk / folder) for folder in visible)
    assert not (small_disk / "night/run.json").exists()
