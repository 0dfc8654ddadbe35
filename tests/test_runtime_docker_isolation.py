"""What a rollout can reach from inside its container: the model, and nothing else.

Each probe is shown to have teeth: a container on Docker's own network reaches what the rollout does not.
"""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from docker_fixtures import caged_image, engine, ours, play, runtime_at
from stub_server import KEY, MODEL

from flows.runtimes.containers import INTERNAL
from flows.runtimes.docker import DockerRuntime
from flows.runtimes.docker_settings import ContainerSettings

__all__ = ["caged_image", "engine", "runtime_at"]
pytestmark = pytest.mark.docker
PORT = 8000
REACH = "import caged_step, json, sys; print(json.dumps(caged_step.reach(*sys.argv[1:])))"


@pytest.fixture
def runtime(runtime_at: Callable[..., DockerRuntime], tmp_path: Path) -> DockerRuntime:
    return runtime_at(tmp_path / "run")


@pytest.fixture
def model(runtime: DockerRuntime, caged_image: str) -> str:
    """A stand-in for the model server on the rollouts' network, where vLLM's container would be."""
    containers = runtime._containers
    players = containers.network("players", INTERNAL, internal=True)
    front = containers.network("front", {}, internal=False)
    command = ["python", "-m", "http.server", str(PORT)]
    containers.start(
        containers.name("serve"), caged_image, command, ContainerSettings(),
        env={}, mounts=[], network=front, join={players: "model"},
    )  # fmt: skip
    return f"model:{PORT}"


@contextmanager
def listening() -> Iterator[int]:
    """A port that answers on every address of this machine."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def addresses_of_this_machine() -> list[str]:
    """Those that a container could know: of the machine's own card, and of Docker's bridges."""
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    return [address for address in shown if ":" not in address]


def nameserver() -> str:
    """An address that is not of this machine, and that something answers at."""
    lines = Path("/etc/resolv.conf").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("nameserver"))


def test_a_rollout_reaches_the_model_and_nothing_else(
    runtime: DockerRuntime, engine: Any, caged_image: str, model: str, tmp_path: Path
) -> None:
    others = tmp_path / "other-run"
    others.mkdir()
    subnet = runtime._containers._engine.networks.get(runtime._players()).attrs["IPAM"]["Config"][0]["Subnet"]
    of_bridge = subnet.rpartition(".")[0] + ".1"
    with listening() as port:
        machine = [f"{address}:{port}" for address in addresses_of_this_machine()]
        control = engine.containers.run(caged_image, ["python", "-c", REACH, *machine], remove=True)
        assert b"true" in control, "a container on Docker's own network does reach this machine"
        paths = [str(others), str(tmp_path), "/var/run/docker.sock", "/run/docker.sock"]
        outside = [f"{nameserver()}:53", "example.com:80", f"{of_bridge}:{port}", *machine]
        found = play(runtime, " ".join(["reach", model, *outside, *paths]), "rollout", timeout=120)
    assert found.pop(model)
    # The folder above the run's is there, as the way to it, and empty but for it.
    assert found.pop(str(tmp_path))
    assert not any(found.values()), found


def test_only_those_who_play_are_told_the_models_key(runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NIGHTSCHOOL_POLICY_KEY", "NIGHTSCHOOL_POLICY_MODEL", "NIGHTSCHOOL_POLICY_URL"]
    for name in names:
        monkeypatch.setenv(name, "of the flow")
    policy = dict(zip(names, [KEY, MODEL, "http://127.0.0.1:1/v1"], strict=True))
    assert not set(names) & set(play(runtime, "look")["environment"])
    (runtime.root / "caged/look").rename(runtime.root / "caged/looked")
    assert set(names) <= set(play(runtime, "look", "rollout", env=policy)["environment"])


def test_the_networks_of_two_runs_are_two(
    runtime: DockerRuntime, runtime_at: Callable[..., DockerRuntime], engine: Any, model: str, tmp_path: Path
) -> None:
    other = runtime_at(tmp_path / "other")
    assert play(other, f"reach {model}", "rollout") == {model: False}
    assert len(ours(engine, other.root)) == 1
