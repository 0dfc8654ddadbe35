"""What tests of containers share: images with a step that does as it is told, and a stand-in for the model in another.

The images stand on Nightschool's own, so `make images` comes first.
"""

import io
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import docker
import pytest

from flows.runtimes.containers import RUN
from flows.runtimes.docker import DockerRuntime
from flows.runtimes.docker_settings import ContainerSettings, DockerSettings
from steps.common.artifacts import Artifact
from steps.common.step import Inputs, Step

TESTS = Path(__file__).parent
CAGED = "nightschool-test/caged"


class CagedInputs(Inputs):
    """What the step in the image shall do. Its twin is in `caged_step.py`."""

    how: str


class Caged(Artifact):
    """What it found."""

    found: dict[str, Any]


def caged(name: str) -> "Step[CagedInputs, Caged]":
    """The step, under a name that decides where it runs: `rollout`, `group`, `train`."""
    return Step(name, CagedInputs, Caged, lambda inputs, workspace: sys.exit("not in this process"))


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A client of the Docker engine, which must run: `tools/engine start`."""
    with closing(docker.from_env()) as engine:
        yield engine


@pytest.fixture(scope="session")
def caged_image(engine: Any) -> str:
    """The rollout image with `caged_step` and the stand-in for vLLM in it."""
    return with_modules(engine, f"nightschool/rollout:{version('nightschool')}", CAGED, "caged_step", "stub_server")


def with_modules(engine: Any, base: str, image: str, *modules: str, path: str = "") -> str:
    """Builds `image` from `base` and some files of this folder; what is in `path` comes before Python's own modules."""
    recipe = f"FROM {base}\n{f'ENV PYTHONPATH={path}' if path else ''}\nCOPY *.py /opt/nightschool/\n"
    files = {f"{Path(module).name}.py": (TESTS / f"{module}.py").read_text() for module in modules}
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in {"Dockerfile": recipe, **files}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content.encode()), 0o644
            archive.addfile(member, io.BytesIO(content.encode()))
    engine.images.build(fileobj=io.BytesIO(context.getvalue()), custom_context=True, tag=image, rm=True)
    return image


@pytest.fixture
def runtime_at(
    engine: Any, caged_image: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., DockerRuntime]:
    """Makes a runtime whose steps are all `caged_step`, limited as the keywords say; in the end nothing is left."""
    monkeypatch.setattr("flows.runtimes.docker.module_of", lambda step: "caged_step")

    def make(root: Path, **limits: Any) -> DockerRuntime:
        root.mkdir(exist_ok=True)
        container = ContainerSettings(image=caged_image, **limits)
        runtime = DockerRuntime(root, DockerSettings(type="docker", rollout=container, train=container))
        request.addfinalizer(runtime.close)
        return runtime

    return make


def play(runtime: DockerRuntime, how: str, name: str = "group", **more: Any) -> dict[str, Any]:
    """What the step found."""
    said: list[str] = more.pop("said", [])
    env: Mapping[str, str] = more.pop("env", {})
    timeout: float = more.pop("timeout", 60.0)
    step, path = caged(name), f"caged/{how.split()[0]}"
    return runtime.run(step, CagedInputs(how=how), path, env=env, timeout=timeout, say=said.append).found


def ours(engine: Any, root: Path) -> list[str]:
    """Names of the containers and networks that are labelled with a run."""
    label = {"label": f"{RUN}={root.resolve()}"}
    containers = engine.containers.list(all=True, filters=label, ignore_removed=True)
    return [*(c.name for c in containers), *(n.name for n in engine.networks.list(filters=label))]


def wait_for(condition: Callable[[], Any], timeout: float = 30.0) -> None:
    """Returns once it is true."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
