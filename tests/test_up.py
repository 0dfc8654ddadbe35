"""`nightschool up` and `down`: what Prefect is given, that it works for deployments, and that nothing stays."""

import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from flow_fixtures import Steps, config_of
from machine_fixtures import DEPLOYMENTS, FAR_EAST, Machine, alive, machine, wait_for
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools import validate

from flows.command import HEARTBEATS
from flows.job_template import containers_template
from flows.provision import OURS
from flows.runtimes.containers import answers
from flows.train import train
from flows.workers import CONTAINERS, PROCESSES
from steps.common import layout
from steps.common.artifacts import read_manifest
from steps.common.nights import Night
from steps.common.runs import RUNS
from steps.common.status import status_of

__all__ = ["machine"]
DEPLOYED = yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]


@pytest.mark.parametrize("deployed", DEPLOYED, ids=[entry["entrypoint"] + "/" + entry["name"] for entry in DEPLOYED])
def test_a_deployment_explains_itself_in_the_form(deployed: dict[str, Any]) -> None:
    flow = import_object(deployed["entrypoint"])
    schema = parameter_schema(flow)
    untold = [name for name, parameter in schema.properties.items() if not parameter.get("description")]
    assert untold == []
    assert all(parameter["title"] for parameter in schema.properties.values())
    defaults = deployed.get("parameters", {})
    validate(defaults, schema.model_dump(), raise_on_error=True, ignore_required=True)
    assert deployed["description"] and deployed["tags"][0] == "nightschool"
    assert flow.name in OURS  # so that it is called crashed when it was killed with its worker
    assert deployed["work_pool"]["job_variables"]["env"] == HEARTBEATS
    if "config" in schema.properties:
        assert schema.required == ["config"]
        rewind = schema.definitions["Rewind"]["properties"]
        assert rewind["shard"]["description"] == "Only this shard of the rollouts."
    for name, model in schema.definitions.items():
        assert model["description"], name
        assert [key for key, field in model["properties"].items() if not explains_itself(field)] == [], name


def explains_itself(field: dict[str, Any]) -> bool:
    """A setting by its description or the one value that it can have, a table of settings by the model's own."""
    return "description" in field or "const" in field or "$ref" in str(field)


def test_a_flow_in_a_container_gets_the_engine_only_where_it_asks(tmp_path: Path) -> None:
    template = containers_template(tmp_path, tmp_path)
    asking = [f"{entry['entrypoint']}/{entry['name']}" for entry in DEPLOYED if "socket" in job_variables(entry)]
    assert asking == ["flows.train.train/containers"]
    for entry in DEPLOYED:
        if entry["work_pool"]["name"] == "nightschool-docker":
            validate(job_variables(entry), template["variables"], raise_on_error=True)
    job = template["job_configuration"]
    assert job["volumes"][-1] == "{{ socket }}"
    assert job["container_create_kwargs"]["cap_drop"] == ["ALL"]


def job_variables(deployed: dict[str, Any]) -> dict[str, Any]:
    variables: dict[str, Any] = deployed["work_pool"]["job_variables"]
    return variables


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_machine_trains_on_demand_and_by_night(
    steps: Steps, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS, str(machine.runs))
    train(config_of(machine.project))  # what takes models is made here, by tiny steps
    root = machine.runs / "night"
    grouped = read_manifest(root / "iterations/0001/groups")
    held = hold(machine)

    at_once = machine.start("nightschool", "up")
    said = machine.up()
    assert machine.end(at_once) == said
    assert "nightly/nightly (0 2 * * * Pacific/Kiritimati), " in said
    assert ("no Docker engine answers" in said) is not answers()
    processes = machine.processes()
    assert all(processes.values())
    assert len([pid for pid in alive(machine.project) if is_daemon(pid)]) == len(processes)  # no second one of anything
    before = machine.listed()
    assert [len(rows) for rows in before] == [len(DEPLOYED), 2, 1]
    machine.run("prefect", "--no-prompt", "deploy", "--all")
    assert machine.listed() == before

    again = {"iteration": 1, "step": "group"}
    machine.ends("COMPLETED", machine.asked("train/on-demand", config="night.toml", rewind=again))
    anew = read_manifest(root / "iterations/0001/groups")
    assert anew and grouped and anew.started > grouped.started

    today = datetime.now(ZoneInfo(FAR_EAST)).date()
    (root / "nights").mkdir()
    (root / layout.night(today)).write_text(Night(date=today, first=1, last=2).model_dump_json())
    machine.ends("COMPLETED", machine.asked("nightly/nightly", config="night.toml"))  # finds its target reached

    (held / "group").touch()
    machine.asked("train/on-demand", config="night.toml", rewind=again)
    wait_for((held / "group.waiting").exists, 120)
    os.kill(processes.pop(PROCESSES.name) or 0, signal.SIGKILL)  # its flow goes on
    others = [f"the workers of {CONTAINERS.name}"] if CONTAINERS.name in processes else []
    told = "".join(f"stopped {what}\n" for what in [*others, "1 flow runs", "the server"])
    assert machine.run("nightschool", "down") == told
    assert not any(machine.processes().values())
    assert not alive(machine.project)


def hold(machine: Machine) -> Path:
    """A folder: while `group` is in it, that step waits before its artifact counts."""
    held = machine.project / "held"
    held.mkdir()
    machine.environment |= {"HELD": str(held), "PYTHONPATH": str(Path(__file__).parent / "held")}
    return held


def is_daemon(pid: int) -> bool:
    """Leads a session of its own, as the server and the workers do."""
    return os.getsid(pid) == pid


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_killed_with_its_worker_is_retried(
    steps: Steps, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow run, by hand; and a step of a flow that goes on elsewhere, by that flow."""
    monkeypatch.setenv(RUNS, str(machine.runs))
    again = {"iteration": 1, "step": "group"}
    for name in ("night", "far"):
        train(config_of(machine.project, f"name={name}"))
    machine.run("nightschool", "rewind", "far", "--iteration=1", "--step=group")
    held = hold(machine)
    (held / "group").touch()

    machine.up()
    elsewhere = ["name=far", "runtime.type=pool", "runtime.flow=step/train"]
    goes_on = machine.start("nightschool", "train", "night.toml", *(f"--set={setting}" for setting in elsewhere))
    killed = machine.asked("train/on-demand", config="night.toml", rewind=again)
    wait_for(lambda: len(list(machine.runs.glob("*/iterations/0001/.groups*/manifest.json"))) == 2, 120)
    for pid in alive(machine.project):
        if pid != goes_on.pid and "uvicorn" not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    when = time.monotonic()
    machine.ends("CRASHED", killed, within=120)
    print(f"called crashed {time.monotonic() - when:.0f} s after the kill")

    (held / "group").unlink()
    machine.up()
    machine.run("prefect", "flow-run", "retry", killed)
    machine.ends("COMPLETED", killed)
    assert "far is finished" in machine.end(goes_on)
    for name, rewinds in {"night": 1, "far": 1}.items():
        root = machine.runs / name
        assert status_of(root).state == "finished"
        assert not list(root.rglob("*.partial"))
        assert len(list(root.glob("superseded/*"))) == rewinds  # the retry did not go back again
