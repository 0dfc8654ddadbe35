"""The images: what is in them, what is not, and who they run as. `make images` comes first."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import docker
import pytest

from flows.runtimes.places import PLACES

ROOT = Path(__file__).parents[1]
NAMES = ["flow", "rollout", "serve", "train"]
STEPS = {
    "rollout": ["rollout", "evaluate", "group", "collate"],
    "serve": ["serve"],
    "train": ["train", "initialize", "sft", "pretrain", "export", "publish"],
}
FORBIDDEN = re.compile(
    r"(PIP|UV|SSL|CURL|REQUESTS)_\w+|\b(index-url|find-links|trusted-host)\b|https?://", re.IGNORECASE
)
in_containers = pytest.mark.docker


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with closing(docker.from_env()) as engine:
        yield engine


def tag(name: str) -> str:
    return f"nightschool/{name}:{version('nightschool')}"


def output(engine: Any, name: str, *command: str) -> str:
    """What a command prints in an image's container."""
    printed: bytes = engine.containers.run(tag(name), list(command), remove=True, network_mode="none")
    return printed.decode()


@in_containers
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_that_built_it_is_in_an_image(engine: Any, name: str) -> None:
    image = engine.images.get(tag(name))
    environment = dict(variable.split("=", 1) for variable in image.attrs["Config"]["Env"])
    assert not [variable for variable in environment if FORBIDDEN.search(variable)]
    assert not [layer["CreatedBy"] for layer in image.history() if "/secrets" in layer["CreatedBy"]]
    history = " ".join(layer["CreatedBy"] for layer in image.history())
    assert not FORBIDDEN.search(history)
    look = "cat /etc/pip.conf /etc/uv/uv.toml ~/.config/pip/pip.conf; ls -A /cache /wheels /src /run/secrets; true"
    assert output(engine, name, "sh", "-c", f"({look}) 2>/dev/null") == ""
    if bundle := os.environ.get("SSL_CERT_FILE"):
        mine = Path(bundle).read_bytes()
        theirs = output(engine, name, "cat", "/etc/ssl/certs/ca-certificates.crt").encode()
        public = output(engine, name, "sh", "-c", "cat /usr/share/ca-certificates/mozilla/*.crt").encode()
        added = set(certificates(mine)) - set(certificates(public))
        assert not added & set(certificates(theirs))


def certificates(bundle: bytes) -> list[bytes]:
    """Each certificate's base64, without line ends."""
    found = re.findall(rb"-----BEGIN CERTIFICATE-----(.+?)-----END", bundle, flags=re.DOTALL)
    return [b"".join(one.split()) for one in found]


@in_containers
@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_as_nobody_in_particular(engine: Any, name: str) -> None:
    config = engine.images.get(tag(name)).attrs["Config"]
    assert config["User"] == "1000:1000"
    assert "PYTHONSAFEPATH=1" in config["Env"]
    assert config.get("Volumes") is None
    writable = (
        "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/tmp*' -not -path '/dev/*' 2>/dev/null"
    )
    found = set(output(engine, name, "sh", "-c", f"{writable}; true").split())
    assert found <= {"/var/tmp", "/run/lock"}


@in_containers
@pytest.mark.parametrize("name", NAMES)
def test_an_image_holds_the_project_as_a_wheel_and_the_pinned_versions(engine: Any, name: str) -> None:
    script = (
        "import json, re, steps, importlib.metadata as m; "
        "versions = {re.sub('[-_.]+', '-', d.name).lower(): d.version for d in m.distributions()}; "
        "print(json.dumps([steps.__file__, versions]))"
    )
    file, versions = json.loads(output(engine, name, "python", "-c", script))
    assert file == "/opt/nightschool/steps/__init__.py"
    assert versions["nightschool"] == version("nightschool")
    variants = {"flow": ["flow-image"], "rollout": ["rollout"]}.get(name, [f"{name}-cpu", f"{name}-cuda"])
    pins = [dict(re.findall(r"^([\w.-]+)==([^ ]+)", pin_file(v).read_text(), flags=re.MULTILINE)) for v in variants]
    extras = {"nightschool", "vllm", "pip", "setuptools"}
    assert any(set(versions.items()) - {(e, versions.get(e)) for e in extras} <= set(pin.items()) for pin in pins)


def pin_file(variant: str) -> Path:
    return ROOT / "requirements" / f"{variant}.txt"


@in_containers
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_each_step_starts_in_its_image(engine: Any, name: str, step: str) -> None:
    assert output(engine, name, "python", "-m", f"steps.{step}", "--help").startswith(f"usage: python -m steps.{step}")


@in_containers
def test_the_flow_image_has_the_command_line(engine: Any) -> None:
    assert "train" in output(engine, "flow", "nightschool", "--help")


def test_every_step_is_in_the_table() -> None:
    """The table says where steps run; the runtimes' own table must agree."""
    table = (ROOT / "images/README.md").read_text()
    rows = dict(re.findall(r"^\| `nightschool/(\w+)` \| [^|]+ \| ([^|]+) \|", table, flags=re.MULTILINE))
    for name, steps in STEPS.items():
        assert all(f"`{step}`" in rows[name] for step in steps)
    assert {step: place for step, place in PLACES.items() if step != "fetch_smollm2"} == {
        step: name for name, steps in STEPS.items() if name != "rollout" for step in steps
    }


@pytest.mark.parametrize("name", NAMES)
def test_dockerfiles_name_no_host_and_check_hashes(name: str) -> None:
    recipe = (ROOT / f"images/{name}.Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim$", recipe, flags=re.MULTILINE)
    assert not re.search(r"https?://|\.(org|io|com)/", recipe)
    assert "--require-hashes" in (ROOT / "images/install").read_text()


@pytest.mark.parametrize("script", ["images/base", "images/build", "images/install", "tools/engine"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=10)
