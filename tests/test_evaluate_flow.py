"""Evaluations on demand: by the run's own settings, found again, and without a trace but the evaluation."""

import time
from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterName
from prefect.utilities.callables import parameter_schema

from flows.evaluate import evaluate
from flows.train import train
from steps.common import layout
from steps.common.errors import InvalidInputs
from steps.common.runs import RunInUse, locked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(200)]
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Prefect's own clients are not closed


def test_every_parameter_is_described() -> None:
    schema = parameter_schema(evaluate)
    assert {name: bool(parameter.get("description")) for name, parameter in schema.properties.items()} == {
        "run": True,
        "iteration": True,
    }
    assert list(schema.required) == ["run"]


@pytest.fixture
def root(steps: Steps, runs: Path, tmp_path: Path) -> Path:
    """A run of three iterations, of which the checkpoints 0, 2 and 3 were evaluated."""
    train(config_of(tmp_path, "iterations=3", "evaluate.every=2"))
    steps.made.clear(), steps.served.clear()
    return runs / "night"


def contents(root: Path) -> dict[str, bytes]:
    """`run.json` and every manifest."""
    files = [root / layout.RUN, *root.rglob(layout.MANIFEST)]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def task_runs(flow_run: str) -> dict[str, str]:
    """States of an evaluation's tasks, by name, once the server has heard of them all."""
    end = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        flow, name = FlowFilter(name=FlowFilterName(any_=["evaluate"])), FlowRunFilterName(any_=[flow_run])
        while time.monotonic() < end:
            found = client.read_task_runs(flow_filter=flow, flow_run_filter=FlowRunFilter(name=name))
            states = {run.name: run.state.name for run in found if run.state and run.state.is_final()}
            if "report" in states or "Reused" in states.values():
                return states
            time.sleep(0.5)
    raise AssertionError(f"of {flow_run} the server knows {states}")


def test_a_checkpoint_is_evaluated_once_and_nothing_else_changes(steps: Steps, root: Path) -> None:
    before = contents(root)
    made = evaluate("night", 1)
    assert (made.iteration, made.tasks) == (1, 3)
    assert (steps.made, steps.served) == (["evaluations/0001"], ["checkpoints/0001"] * 2 + ["stopped"])
    after = contents(root)
    assert after.keys() - before.keys() == {"evaluations/0001/manifest.json"}
    assert {path: after[path] for path in before} == before
    assert task_runs("night 0001") == {"serve 0001": "Completed", "evaluate 0001": "Completed", "report": "Completed"}

    steps.made.clear(), steps.served.clear()
    assert evaluate(str(root), 1) == made
    assert (steps.made, steps.served) == ([], ["stopped"])
    assert contents(root) == after


def test_without_a_number_the_newest_is_meant(steps: Steps, root: Path) -> None:
    assert evaluate("night").iteration == 3
    assert steps.made == []
    assert task_runs("night")["evaluate 0003"] == "Reused"


def test_what_can_not_be_evaluated_is_refused(steps: Steps, root: Path) -> None:
    with pytest.raises(InvalidInputs, match=r"no finished checkpoint 9: there are 0, 1, 2, 3"):
        evaluate("night", 9)
    with pytest.raises(InvalidInputs, match="there is no run 'day'"):
        evaluate("day")
    with locked(root), pytest.raises(RunInUse, match="is in use by process"):
        evaluate("night", 1)
    assert steps.made == []
