"""A real S3 server for tests (SeaweedFS), a proxy in front of it that makes trouble, and small runs to back up.

The server is the program from PyPI, or a container of the image that SEAWEEDFS_IMAGE names.
"""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import boto3
import pytest
from aiohttp import ClientSession, web
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from threaded_server import ThreadedServer

from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.runs import RunRecord, write_record
from steps.common.step import Inputs, Step, Workspace
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteRun
from steps.remote.settings import BucketSettings

KEY, SECRET = "key-of-tests", "secret-that-must-not-be-seen-anywhere"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
BUCKET = "backup"
WEED = Path(sys.executable).parent / "weed"
IMAGE = os.environ.get("SEAWEEDFS_IMAGE")
PORTS = ("s3", "master", "volume", "filer", "admin")
FLAGS = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false", "-master.telemetry=false")


class Weed:
    """SeaweedFS with one bucket. It may be killed, and started again on the same ports with the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['s3']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once the bucket is there."""
        ports = [f"-{name}.port={port}" for name, port in self.ports.items()]
        others = ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={BUCKET}"]
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program(), "mini", "-dir", self.folder / "data", *FLAGS, *ports, *others],
                env=os.environ | CREDENTIALS,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        end = time.monotonic() + 60
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < end, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """At once, as if the power failed."""
        if self._process:
            if IMAGE:
                subprocess.run(["docker", "kill", self._name], check=True, capture_output=True, timeout=60)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @property
    def _name(self) -> str:
        """Of the container."""
        return f"nightschool-test-weed-{self.ports['s3']}"

    def _program(self) -> list[str | Path]:
        if IMAGE is None:
            return [WEED]
        options = ["--rm", "--name", self._name, "--network=host", "--user=0", f"--volume={self.folder}:{self.folder}"]
        return ["docker", "run", *options, *(f"--env={name}" for name in CREDENTIALS), IMAGE]

    def client(self) -> Any:
        """A plain client, to look at what is there."""
        return boto3.session.Session(KEY, SECRET, region_name="us-east-1").client(
            "s3",
            endpoint_url=self.url,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def _is_ready(self) -> bool:
        try:
            self.client().head_bucket(Bucket=BUCKET)
        except (BotoCoreError, ClientError):
            return False
        return True


Trouble = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Proxy:
    """Passes requests on to the server, but for those with which `trouble` does something else.

    A signature covers the host, so this one passes the client's on.
    """

    url: str = ""
    upstream: str = ""
    trouble: Trouble | None = None
    flip: str | None = None
    """A part of a path: the answer to its GET comes with one bit flipped, once."""
    cut: str | None = None
    """A part of a path: the answer to its GET ends in the middle, once."""
    stall: str | None = None
    """A part of a path: the answer to its GET goes on only after five seconds, once."""
    seen: list[str] = field(default_factory=list)
    """Method and path of each request."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path_qs}")
        if self.trouble and (answer := await self.trouble(request)):
            return answer
        async with ClientSession(auto_decompress=False) as session:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
            url = self.upstream + request.raw_path
            async with session.request(
                request.method,
                web_url(url),
                headers=headers,
                data=io.BytesIO(await request.read()),
                allow_redirects=False,
            ) as answer:
                return await self._pass_on(request, answer, await answer.read())

    async def _pass_on(self, request: web.Request, answer: Any, body: bytes) -> web.StreamResponse:
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "connection", "date")}
        if request.method == "GET" and self.flip and self.flip in request.path:
            self.flip, body = None, bytes([body[0] ^ 1]) + body[1:]
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        if request.method == "GET" and self.cut and self.cut in request.path:
            self.cut = None
            await response.write(body[: len(body) // 2])
            assert request.transport
            request.transport.close()
            return response
        if request.method == "GET" and self.stall and self.stall in request.path:
            self.stall = None
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(5)
            return response
        if request.method != "HEAD":
            await response.write(body)
        await response.write_eof()
        return response


def web_url(url: str) -> Any:
    """Not encoded a second time."""
    from yarl import URL

    return URL(url, encoded=True)


def says(status: int, code: str) -> web.Response:
    """An S3 error."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no, {SECRET}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, of which SeaweedFS takes each one and the one 10,000 above."""
    found: list[int] = []
    with_offset = Random()
    while len(found) < count:
        port = with_offset.randrange(20_000, 50_000)
        try:
            for taken in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", taken))
        except OSError:
            continue
        found.append(port)
    return found


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """The server."""
    server = Weed(tmp_path_factory.mktemp("weed"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def place(weed: Weed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> BucketSettings:
    """A prefix of its own in the bucket, by the environment, with a secret that can be recognised."""
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60] + f"-{time.time_ns()}"
    for name, value in environment(weed.url, prefix).items():
        monkeypatch.setenv(name, value)
    settings = BucketSettings.from_environment()
    assert settings
    return settings


def environment(url: str, prefix: str) -> dict[str, str]:
    """The variables of a machine that backs up."""
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "BACKUP_BUCKET": BUCKET,
        "BACKUP_PREFIX": prefix,
        "BACKUP_PATH_STYLE": "path",
        **CREDENTIALS,
    }


@pytest.fixture
def proxy(weed: Weed, place: BucketSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between the client and the server."""
    proxy = Proxy(upstream=weed.url)
    with ThreadedServer(web.route("*", "/{path:.*}", proxy.handle)) as server:
        proxy.url = server.url
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


class Filled(Inputs):
    """What a small artifact is filled with."""

    seed: int = 0
    sizes: dict[str, int]


def fill(inputs: Filled, workspace: Workspace) -> dict[str, Any]:
    """Files of random bytes."""
    for name, size in inputs.sizes.items():
        file = workspace.out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(Random(f"{inputs.seed}{name}").randbytes(size))
    return {"iteration": 0, "base_model": "model", "step": 0, "updated": True, "metrics": {}}


def make(root: Path, path: str, seed: int = 0, **sizes: int) -> Checkpoint:
    """An artifact at a path of a run."""
    inputs = Filled(seed=seed, sizes=sizes or {"adapter.bin": 3000, "nested/optimizer.bin": 70_000})
    return Step("train", Filled, Checkpoint, fill).run(inputs, root, path)


def make_run(root: Path, checkpoints: int = 3, seed: int = 0) -> Path:
    """A run with so many checkpoints after the first, and all that lies between them."""
    write_record(root, RunRecord(config={"iterations": checkpoints}, versions={}))
    (root / layout.REPORT).write_text("<html>")
    (root / "nights").mkdir(exist_ok=True)
    (root / "nights/2026-03-02.json").write_text('{"date": "2026-03-02", "first": 0, "last": 3}')
    (root / layout.JUDGE).mkdir(exist_ok=True)
    (root / layout.JUDGE / "0b1d.json").write_text('{"answer": "paid once"}')
    make(root, layout.MODEL, seed)
    for i in range(checkpoints + 1):
        make(root, layout.checkpoint(i), seed + i)
        make(root, layout.evaluation(i), seed + i, **{"trajectories.parquet": 2000})
        if i < checkpoints:
            make(root, layout.rollouts(i, 0), seed + i, **{"trajectories.parquet": 2000})
            make(root, layout.groups(i), seed + i, **{"groups.parquet": 2000})
    return root


def remote(place: BucketSettings, run: str = "night") -> RemoteRun:
    """The run as it lies in the bucket."""
    return RemoteRun(Bucket(place), run)


def tree(root: Path, *without: str) -> dict[str, bytes]:
    """Every file of a run that is not hidden and counts, by its path."""
    apart = {layout.LOGS, layout.SUPERSEDED, *without}
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
        and path.relative_to(root).parts[0] not in apart
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }
