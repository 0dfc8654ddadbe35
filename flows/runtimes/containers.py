"""The containers and networks of one run: made with the least they need, found again by label, and removed.

A container sees the run's folder under its own path, so that paths mean the same inside and outside; the image; and an
empty /tmp. It runs as the folder's owner, without capabilities, and can't write anywhere else.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, LogConfig, Mount

from flows.runtimes.docker_settings import ContainerSettings, Gpus
from steps.common.errors import InvalidInputs, StepFailed

RUN, PATH, FINGERPRINT = "nightschool.run", "nightschool.path", "nightschool.fingerprint"
"""Labels: the run's folder, on everything; the artifact that a step makes, and its inputs' fingerprint."""
INTERNAL = {"com.docker.network.bridge.inhibit_ipv4": "true"}
"""An internal network has no way out but to the host, at the bridge's own address. This one gives the bridge none."""
NO_WAY_OUT = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
"""Answers to what leaves this network don't find back; ports can be published."""


class Containers:
    """What the engine holds for the run at `root`. Raises `InvalidInputs` where no engine answers."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._prefix = f"nightschool-{self.root.name}-{sha256(str(self.root).encode()).hexdigest()[:8]}"
        self._engine = connect()

    def name(self, path: str) -> str:
        """The container of the step that makes `path`: always the same one, so that it is found again."""
        return f"{self._prefix}-{path.replace('/', '-')}"

    def start(
        self,
        name: str,
        image: str,
        command: Sequence[str],
        settings: ContainerSettings,
        *,
        env: Mapping[str, str],
        mounts: Iterable[Mount],
        network: str,
        gpus: Gpus | None = None,
        labels: Mapping[str, str] | None = None,
        ports: Mapping[str, Any] | None = None,
        join: Mapping[str, str] | None = None,
    ) -> Any:
        """Starts a container, in the place of any that has its name. `join` holds more networks, and its name in each.

        Raises `InvalidInputs` where there is no such image, and `StepFailed` where the engine won't start it.
        """
        self.remove(name)
        owner = self.root.stat()
        try:
            container = self._engine.containers.create(
                image,
                list(command),
                name=name,
                labels={RUN: str(self.root), **(labels or {})},
                environment=dict(env),
                user=f"{owner.st_uid}:{owner.st_gid}",
                working_dir="/tmp",
                mounts=list(mounts),
                network=network,
                ports=dict(ports or {}),
                init=True,
                read_only=True,
                tmpfs={"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={settings.tmp}"},
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                mem_limit=settings.memory,
                memswap_limit=settings.memory,
                nano_cpus=int(settings.cpus * 1e9) if settings.cpus else None,
                pids_limit=settings.pids,
                shm_size=settings.shm,
                device_requests=device_requests(gpus),
                log_config=LogConfig(type="json-file", config={"max-size": "64m"}),
            )
        except ImageNotFound:
            raise InvalidInputs(f"there is no image {image} on this machine: run `make images`") from None
        try:
            for other, alias in (join or {}).items():
                self._engine.networks.get(other).connect(container, aliases=[alias])
            container.start()
        except BaseException as error:
            remove(container)
            if isinstance(error, APIError):
                raise StepFailed(f"the engine can't start {image}: {error.explanation}") from None
            raise
        return container

    def find(self, name: str) -> Any | None:
        """The container of that name, running or not."""
        try:
            return self._engine.containers.get(name)
        except NotFound:
            return None

    def all(self) -> list[Any]:
        """All that carry the run's label, running or not."""
        return labelled(self._engine, f"{RUN}={self.root}")

    def remove(self, name: str) -> None:
        """Ends and removes a container; nothing happens where there is none."""
        if container := self.find(name):
            remove(container)

    def network(self, purpose: str, options: Mapping[str, str], *, internal: bool) -> str:
        """A network of this run, made where it is missing; returns its name."""
        name = f"{self._prefix}-{purpose}"
        if not self._engine.networks.list(names=[f"^{name}$"]):
            self._engine.networks.create(
                name, driver="bridge", internal=internal, options=dict(options), labels={RUN: str(self.root)}
            )
        return name

    def close(self) -> None:
        """Closes connections that are idle; what comes later opens new ones."""
        self._engine.close()

    def sweep(self, spare: Iterable[str] = ()) -> int:
        """Removes the run's containers but for those that make one of the artifacts in `spare`, then its networks."""
        kept = set(spare)
        return sweep(self._engine, lambda labels: labels[RUN] == str(self.root) and labels.get(PATH) not in kept)


def connect() -> Any:
    """A client of the engine. Raises `InvalidInputs` where none answers."""
    try:
        engine = docker.from_env(timeout=60)
    except DockerException as error:  # it has asked for the version of the engine's interface
        raise InvalidInputs(f"no Docker engine answers ({error}): start one, as with `tools/engine start`") from None
    return engine


def answers() -> bool:
    """Whether an engine runs at all."""
    try:
        connect().close()
    except InvalidInputs:
        return False
    return True


def labelled(engine: Any, label: str) -> list[Any]:
    """The containers with a label, running or not; without those that are removed while the engine is asked."""
    found: list[Any] = engine.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    return found


def sweep(engine: Any, chosen: Callable[[Mapping[str, str]], bool]) -> int:
    """Removes those of our containers and networks whose labels are `chosen`; returns how many were containers."""
    containers = [container for container in labelled(engine, RUN) if chosen(container.labels)]
    for container in containers:
        remove(container)
    for network in engine.networks.list(filters={"label": RUN}):
        if chosen(network.attrs["Labels"]):
            try:
                network.remove()
            except APIError as error:
                if error.status_code not in (403, 404):  # a container that was spared uses it; someone else removed it
                    raise
    return len(containers)


def sweep_runs(folder: Path) -> int:
    """Removes the containers and networks of all runs in `folder`; returns how many containers there were."""
    engine = connect()
    try:
        return sweep(engine, lambda labels: Path(labels[RUN]).is_relative_to(folder.resolve()))
    finally:
        engine.close()


def remove(container: Any) -> None:
    """Ends and removes it, whoever else does so too."""
    try:
        container.remove(force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # it is being removed
            raise


def follow(container: Any, write: Callable[[str], None]) -> None:
    """Hands every line over, from the container's first to its last."""
    rest = b""
    try:
        for chunk in container.logs(stream=True, follow=True):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                write(line.decode(errors="replace"))
    except NotFound:
        pass  # removed meanwhile
    if rest:
        write(rest.decode(errors="replace"))


def image_of(settings: ContainerSettings, place: str) -> str:
    """The image that is set, or ours."""
    return settings.image or f"nightschool/{place}:{version('nightschool')}"


def device_requests(gpus: Gpus | None) -> list[DeviceRequest]:
    """What `--gpus` would ask for."""
    if gpus is None:
        return []
    which = {"device_ids": gpus} if isinstance(gpus, list) else {"count": -1 if gpus == "all" else gpus}
    return [DeviceRequest(driver="nvidia", capabilities=[["gpu", "compute", "utility"]], **which)]


def folder_mount(folder: Path, *, read_only: bool) -> Mount:
    """A folder of this machine, under its own path."""
    return Mount(target=str(folder), source=str(folder), type="bind", read_only=read_only)


def threads() -> dict[str, str]:
    """A container sees all of the machine's cores, whatever it may use of them."""
    return {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
