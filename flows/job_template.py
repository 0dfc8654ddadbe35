"""The base job template of the work pool whose flow runs are containers of this machine: what each is given of it.

A flow in a container starts its steps' containers beside itself, through the engine. So folders are mounted at their
own paths, which mean the same to the flow, the engine and the steps. The network is the machine's: Prefect's API and
the model server may be on its loopback. The engine's socket is for deployments that ask for it (`job_variables`): a
flow that plays a step by itself must not command the engine.
"""

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect_docker.worker import DockerWorker  # type: ignore[import-untyped]

from flows.runtimes.containers import RUN
from steps.common.runs import RUNS

IMAGE = f"nightschool/flow:{version('nightschool')}"
ENGINE = Path("/var/run/docker.sock")
DEFAULTS = {"image": IMAGE, "image_pull_policy": "Never", "auto_remove": True}
SOCKET = {
    "title": "The engine's socket",
    "type": "string",
    "description": f"{ENGINE}:{ENGINE}, for flows that start containers. Whoever has it rules the machine.",
}


def containers_template(runs: Path, project: Path) -> dict[str, Any]:
    """Prefect's own template for Docker, in which what depends on this machine is fixed.

    The container runs as the owner of the folder `runs`; in `project`, which it can't write to, are settings files.
    """
    template: dict[str, Any] = DockerWorker.get_default_base_job_template()
    job: dict[str, Any] = template["job_configuration"]
    job |= {
        "network_mode": "host",
        "volumes": [f"{runs}:{runs}", f"{project}:{project}:ro", "{{ socket }}"],
        "env": {"PREFECT_HOME": "/tmp/prefect", RUNS: str(runs)} | threads(),
        "labels": {RUN: str(runs)},
        "container_create_kwargs": confinement(runs),
    }
    del job["networks"], job["privileged"]
    variables: dict[str, Any] = template["variables"]["properties"]
    variables["socket"] = SOCKET
    for name, value in DEFAULTS.items():
        variables[name]["default"] = value
    used = {"env", *re.findall(r"{{ (\w+) }}", str(job))}
    template["variables"]["properties"] = {name: variables[name] for name in variables if name in used}
    return template


def threads() -> dict[str, str]:
    """As many threads as processes of this machine use: results of training depend on it."""
    return {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}


def confinement(runs: Path) -> dict[str, Any]:
    """As for steps: the folder's owner, who may also use the engine's socket where it is there; no capabilities."""
    owner = runs.stat()
    return {
        "user": f"{owner.st_uid}:{owner.st_gid}",
        "group_add": [str(ENGINE.stat().st_gid)] if ENGINE.exists() else [],
        "init": True,
        "read_only": True,
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
    }
