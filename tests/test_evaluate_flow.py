"""Evaluations on demand: by the run's own settings, found again, and without a trace but the evaluation."""

import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of
from judge_fixtures import KEY, KEY_VARIABLE, JudgeServer
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterName
from prefect.utilities.callables import parameter_schema

from flows.config import ModelSettings
from flows.evaluate import evaluate
from flows.show import find_trajectory
from flows.train import train
from steps.common import layout
from steps.common.comparison import comparison
from steps.common.errors import InvalidInputs
from steps.common.query import select
from steps.common.report import report_of
from steps.common.retention import Policy
from steps.common.retention import judge as what_goes
from steps.common.rewind import Rewind, rewind
from steps.common.runs import RunInUse, locked
from steps.common.status import ModelStatus, damages, status_of
from steps.evaluate_model import ModelServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(200)]
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Prefect's own clients are not closed


def test_every_parameter_is_described() -> None:
    schema = parameter_schema(evaluate)
    assert {name: bool(parameter.get("description")) for name, parameter in schema.properties.items()} == {
        "run": True,
        "iteration": True,
        "model": True,
        "env": True,
        "server": True,
        "overrides": True,
    }
    assert list(schema.required or ()) == []


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


# --- other models


@pytest.fixture
def wise(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """Somebody's server, with a model that knows no moves."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with JudgeServer() as server:
        server.reply = lambda request, number: "I would rather not"
        yield server


def at(server: JudgeServer) -> ModelServer:
    return ModelServer(base_url=server.url, key_variable=KEY_VARIABLE)


def test_another_model_is_compared_with_the_checkpoints(steps: Steps, root: Path, wise: JudgeServer) -> None:
    record = (root / layout.RUN).read_bytes()
    made = evaluate("night", model="wise/one", server=at(wise))
    assert (made.model.name, made.tasks, steps.served) == ("wise/one", 3, ["stopped"])
    asked = len(wise.requests)
    assert evaluate("night", model="wise/one", server=at(wise)) == made
    assert len(wise.requests) == asked and (root / layout.RUN).read_bytes() == record
    assert task_runs("night wise/one")["evaluate wise/one"] in ("Completed", "Reused")

    assert status_of(root).models == [ModelStatus(model="wise/one", reward=made.reward, stderr=made.stderr, n=3)]
    models = select(root, "SELECT model, count(iteration), count(*) FROM evaluations GROUP BY 1 ORDER BY 1").rows()
    assert models == [("night@0", 3, 3), ("night@2", 3, 3), ("night@3", 3, 3), ("wise/one", 0, 3)]
    found = comparison(root, checkpoints=True)
    assert found.reference == "night@3"
    assert [row.model for row in found.models] == ["night@0", "night@2", "night@3", "wise/one"]
    pairs = found.models[-1].difference
    assert pairs and (pairs.pairs, pairs.difference) == (3, pytest.approx(made.reward - 0.5))
    others = report_of(root).others
    assert others and [row.model for row in others.models] == ["night@3", "wise/one"]
    page = (root / layout.REPORT).read_text()
    others = ["sampling.max_tokens=50"]
    evaluate("night", model="wise/one", server=at(wise), overrides=others)
    assert evaluate("night", 2, overrides=others).path.startswith("evaluations/0002-")
    names = {row.model for row in comparison(root, checkpoints=True).models}
    assert names >= {"wise/one", "wise/one (max_tokens 50)", "night@2", "night@2 (max_tokens 50)"}
    assert page.count("wise/one") == 2 and "stroke-dasharray" in page and "less night@3 (95%)" in page


def test_what_another_model_has_played_stays(steps: Steps, root: Path, wise: JudgeServer) -> None:
    path = evaluate("night", model="wise", server=at(wise)).path
    verdicts = what_goes(root, Policy(last=1, rollout_days=0), datetime.now(UTC) + timedelta(days=9), None)
    assert [verdict.path for verdict in verdicts if verdict.path.startswith("evaluations")] == []
    rewind(root, Rewind(iteration=0, step="train"))
    assert (root / path / layout.MANIFEST).exists()
    assert dict(damages(root))[root / path] is None
    config = config_of(root.parent, "iterations=3", "evaluate.every=2", "retention.best=1")
    assert [evaluation.iteration for evaluation in train(config)] == [0, 2, 3]
    (root / path / "trajectories.parquet").write_bytes(b"")
    assert "trajectories.parquet" in str(dict(damages(root))[root / path])


def test_what_the_base_has_played_goes_aside_where_another_is_made(steps: Steps, root: Path, wise: JudgeServer) -> None:
    path = evaluate("night", model="wise", server=at(wise)).path
    base = root / f"{path}-base"
    shutil.copytree(root / path, base)
    manifest = (base / layout.MANIFEST).read_text()
    (base / layout.MANIFEST).write_text(manifest.replace('"name": "wise"', '"name": "base"'))
    _, moved = rewind(root, Rewind(iteration=0, step="pretrain"))
    assert base.relative_to(root).as_posix() in moved and (root / path).exists()


def test_a_transcript_is_found_by_the_models_name(steps: Steps, root: Path, wise: JudgeServer) -> None:
    evaluate("night", model="wise/one", server=at(wise))
    row = find_trajectory(root, "test-wise/one/test-1/0")
    assert (row["model"], row["task_id"]) == ("wise/one", "test-1") and "I would rather not" in row["messages"]
    assert find_trajectory(root, "test-0002/test-1/0")["model"] == "night@2"


def test_a_run_may_begin_with_other_models(steps: Steps, runs: Path, tmp_path: Path, wise: JudgeServer) -> None:
    settings = ["evaluate.tasks=3", "runtime.type=inline"]
    made = evaluate(env="tic_tac_toe", model="wise", server=at(wise), overrides=settings)
    root = runs / "tic_tac_toe"
    status = status_of(root)
    assert (status.state, status.checkpoints, len(status.models)) == ("stopped", [], 1)
    assert comparison(root, checkpoints=True).reference is None
    with pytest.raises(InvalidInputs, match="has no model to train"):
        train(config_of(tmp_path).model_copy(update={"model": ModelSettings()}))

    train(config_of(tmp_path, "name=tic_tac_toe"))
    assert comparison(root, checkpoints=False).reference == "tic_tac_toe@2"
    elsewhere = ["environment.options.plays=O", "evaluate.tasks=3"]
    evaluate("tic_tac_toe", model="wise", server=at(wise), overrides=elsewhere)
    found = comparison(root, checkpoints=False)
    assert ([row.model for row in found.models], found.elsewhere) == (["tic_tac_toe@2", "wise"], 1)
    assert (root / made.path).exists()
