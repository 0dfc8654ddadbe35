"""The supervision of a server without a server: its endpoint, its port, and that nothing outlives it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from steps.common.errors import ServerFault
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs, ServeSettings
from steps.serving.supervisor import reserved_port, wait_until_ready


def test_the_endpoint_file_is_private(tmp_path: Path) -> None:
    endpoint = Endpoint(
        base_url="http://x/v1",
        api_key="k",
        pid=1,
        model="base",
        root=tmp_path,
        inputs=ServeInputs(base_model="owner/name"),
    )
    assert Endpoint.read(tmp_path / "e.json") is None
    endpoint.write(tmp_path / "e.json")
    assert stat.S_IMODE((tmp_path / "e.json").stat().st_mode) == 0o600
    assert Endpoint.read(tmp_path / "e.json") == endpoint
    (tmp_path / "e.json").write_text("{}")
    with pytest.raises(ServerFault, match=r"e\.json"):
        Endpoint.read(tmp_path / "e.json")


def test_a_reserved_port_is_given_to_nobody() -> None:
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # As vLLM does it:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


@pytest.fixture
def other_server() -> Iterator[tuple[int, list[str]]]:
    """Another run's server on our port: it is healthy and accepts any key. Its port, and the paths it was asked for."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"data": [{"id": "base-2", "root": "owner/name"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def test_another_server_on_the_port_is_not_ours(other_server: tuple[int, list[str]]) -> None:
    port, asked = other_server
    inputs = ServeInputs(base_model="owner/name", settings=ServeSettings(startup_timeout=0.5))
    endpoint = Endpoint(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="k", pid=1, model="base-1", root=Path(), inputs=inputs
    )
    with pytest.raises(ServerFault, match=r"did not answer within 0\.5 s"):
        wait_until_ready(endpoint, alive=lambda: True)
    assert set(asked) == {"/v1/models"}


FAMILY = """
import sys, time
from pathlib import Path
from steps.serving import supervisor
from steps.serving.command import Command
from steps.serving.supervisor import Stopped, running, stop_when_asked

supervisor.GRACE = 0.5
# It ignores SIGTERM, as vLLM does with a request under way, and has a child that would outlive it.
stubborn = Command(["sh", "-c", "trap '' TERM; sleep 1000 & sleep 1001"], {"PATH": "/bin:/usr/bin"})
stop_when_asked(lifeline=True)
try:
    with running(stubborn, Path("log")) as process:
        print(process.pid, flush=True)
        process.wait()
        print("ended", flush=True)
except Stopped:
    print("stopped", flush=True)
"""


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(file.parent.name))
    return found


def gone_within(group: int, seconds: float) -> bool:
    """Waits for the end of a process group."""
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(group)


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGKILL", "leader"])
def test_nothing_outlives_the_supervisor(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as supervisor:
        assert supervisor.stdin and supervisor.stdout
        group = int(supervisor.stdout.readline())
        deadline = time.monotonic() + 10
        while len(members(group)) < 4 and time.monotonic() < deadline:  # guard, leader, two sleeps
            time.sleep(0.05)
        assert len(members(group)) == 4
        if end == "stdin":
            supervisor.stdin.close()
        elif end == "leader":
            os.kill(group, signal.SIGKILL)
        else:
            supervisor.send_signal(getattr(signal, end))
        assert gone_within(group, 15)
        said = supervisor.stdout.read()
        assert said == {"stdin": "stopped\n", "SIGTERM": "stopped\n", "SIGKILL": "", "leader": "ended\n"}[end]
