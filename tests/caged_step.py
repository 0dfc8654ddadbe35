"""A step for the inside of a container: does as it is told, or looks what it could do, and reports that."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from steps.common.artifacts import Artifact
from steps.common.errors import InvalidInputs, ServerFault
from steps.common.step import Inputs, Step, Workspace

PLACES = ("/", "/opt/nightschool", "/etc", "/usr", "/tmp", "/dev/shm")


class CagedInputs(Inputs):
    how: str


class Caged(Artifact):
    found: dict[str, Any]


def caged(inputs: CagedInputs, workspace: Workspace) -> dict[str, Any]:
    """Do as told."""
    how, *arguments = inputs.how.split()
    print("at work:", how, flush=True)
    with workspace.out.with_name("attempts").open("a") as file:
        file.write(f"{how}\n")
    return {"found": globals()[how](*arguments) or {}}


def well() -> None:
    for number in range(3):
        print("line", number, flush=True)


def refuse() -> None:
    raise InvalidInputs("the inputs are odd")


def fault() -> None:
    raise ServerFault("the server is gone")


def crash() -> None:
    raise RuntimeError("a bug")


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nap(seconds: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(float(seconds))


def eat(mebibytes: str) -> None:
    sys.stdout.write(str(len(bytearray(int(mebibytes) << 20))))


def fork(wanted: str) -> dict[str, Any]:
    children = []
    try:
        for _ in range(int(wanted)):
            if (pid := os.fork()) == 0:
                time.sleep(60)
            children.append(pid)
    except BlockingIOError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return {"children": len(children)}


def look() -> dict[str, Any]:
    """Who it is and what it may do."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "environment": sorted(os.environ),
        "user": [os.getuid(), os.getgid()],
        "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
        "no_new_privileges": status["NoNewPrivs"] == "1",
        "writable": [place for place in PLACES if _writes(place)],
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    }


def _writes(place: str) -> bool:
    try:
        (Path(place) / "proof").write_text("")
    except OSError:
        return False
    return True


def reach(*targets: str) -> dict[str, Any]:
    """Which of `host:port` and of the paths it can reach, and whether it finds a stranger's name."""
    return {target: Path(target).exists() if target.startswith("/") else _connects(target) for target in targets}


def _connects(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def write(*folders: str) -> dict[str, Any]:
    """In which of the folders it can leave a file."""
    return {folder: _writes(folder) for folder in folders}


def addresses() -> dict[str, Any]:
    """Its own address, and the one that its network's host would have."""
    mine = socket.gethostbyname(socket.gethostname())
    return {"mine": mine, "host": mine.rpartition(".")[0] + ".1"}


CAGED = Step("caged", CagedInputs, Caged, caged)

if __name__ == "__main__":
    CAGED.main()
