"""Our own Prefect API server and UI, on SQLite: started where none is configured, and left running.

It lives in `<runs>/.prefect`: its database, its log, a record of its process.
"""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from flows.daemons import Daemon, locked, spawn, started
from steps.common.errors import NightschoolError
from steps.common.runs import runs_folder
from steps.common.storage import write_atomically

SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_API_URL": "/api",  # else the UI asks port 4200, whatever the server's own
    # The recorders' defaults take 30 task runs a second and drop what comes faster.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
}
STARTING = 180.0
"""Seconds that the first start on a slow machine may take; it makes the database."""
RECORD, LOCK = "server.json", "server.lock"


class ServerNotReady(NightschoolError):
    """Prefect's server does not answer."""


class ServerRecord(Daemon):
    """`server.json`."""

    port: int

    @property
    def ui(self) -> str:
        """The UI's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> str:
        """The API's address."""
        return f"{self.ui}/api"


def home() -> Path:
    """Where our server lives: with the runs that it tells of."""
    return runs_folder() / ".prefect"


def ensure_server(home: Path) -> ServerRecord:
    """Our server, started where it does not run, and answering. Raises `ServerNotReady`."""
    with locked(home / LOCK):
        return ServerRecord.read(home / RECORD) or _start(home)


def wait_until_ready(home: Path, record: ServerRecord) -> None:
    """Waits for a server that was just started. Raises `ServerNotReady`."""
    end = time.monotonic() + STARTING
    while not _answers(record.api):
        if not record.runs():
            raise ServerNotReady(f"Prefect's server ended while starting: see {home / 'server.log'}")
        if time.monotonic() > end:
            raise ServerNotReady(f"Prefect's server did not answer in {STARTING:.0f} s: see {home / 'server.log'}")
        time.sleep(0.1)


def stop_server(home: Path) -> bool:
    """Stops our server; False where none runs."""
    with locked(home / LOCK):
        record = ServerRecord.read(home / RECORD)
        if record:
            record.stop()
    return record is not None


def _start(home: Path) -> ServerRecord:
    port = _last_port(home)
    # What `prefect server start` runs in the end, without the seconds that its command line takes to load.
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--timeout-keep-alive", "5"]
    environment = os.environ | SETTINGS | {"PREFECT_HOME": str(home), "PREFECT__SERVER_FINAL": "1"}
    pid = spawn(command, environment, home / "server.log")
    record = ServerRecord(pid=pid, started=started(pid) or "", port=port)
    write_atomically(home / RECORD, record.model_dump_json().encode())
    return record


def _last_port(home: Path) -> int:
    """The port that it had before, where that is free: whoever was told it finds it again."""
    try:
        port = int(json.loads((home / RECORD).read_text())["port"])
    except (FileNotFoundError, ValueError, KeyError):
        return _free_port()
    return port if _free(port) else _free_port()


def _answers(api: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
