"""How models are compared: pairs of rewards, an interval that agrees with a formula, and only what can be compared."""

import math
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
from run_fixtures import group_of

from environments import TrajectoryGroup
from flows.report import markdown
from steps.common import layout, tables
from steps.common.artifacts import Evaluation, ModelEvaluation
from steps.common.comparison import Comparison, comparison
from steps.common.paired import interval
from steps.common.report import Report, curve
from steps.common.runs import RunRecord, write_record
from steps.common.settings import SamplingSettings
from steps.common.step import Inputs, Step, Workspace

HERE: dict[str, Any] = {"name": "tic_tac_toe", "options": {}}


class Given(Inputs):
    environment: dict[str, Any] = HERE
    sampling: SamplingSettings = SamplingSettings()
    who: str = ""


def played(root: Path, who: int | str, rewards: list[float | None], measured: str = "", **given: Any) -> None:
    """Publishes an evaluation: of a checkpoint by its number, of another model by its name."""
    scored = [reward for reward in rewards if reward is not None]

    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        groups: list[TrajectoryGroup] = [group_of(f"task-{i}", [reward]) for i, reward in enumerate(rewards)]
        tables.write(tables.frame_of_groups(groups, None, 0), workspace.out / tables.TRAJECTORIES)
        workspace.measured |= {measured: 1.0} if measured else {}
        counts = {"tasks": len(rewards), "failed": len(rewards) - len(scored), "failures": {}, "metrics": {}}
        means = {"reward": fmean(scored), "stderr": stdev(scored) / math.sqrt(len(scored))}
        own = {"iteration": who} if isinstance(who, int) else {"model": {"name": who, "digest": None}, "usage": {}}
        return {**own, **counts, **means}

    inputs = Given(who=str(who), **given)
    if isinstance(who, int):
        Step("evaluate", Given, Evaluation, work).run(inputs, root, layout.evaluation(who))
    else:
        path = layout.model_evaluation(who, inputs.fingerprint())
        Step("evaluate_model", Given, ModelEvaluation, work).run(inputs, root, path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_record(tmp_path / "night", RunRecord(config={"iterations": 1, "environment": HERE}, versions={}))
    return tmp_path / "night"


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    random = Random(0)
    ours = {str(i): random.random() + 0.1 for i in range(400)}
    theirs: dict[str, float | None] = {str(i): random.random() for i in range(400)}
    found, other_way = interval(ours, theirs, 0.95), interval(theirs, ours, 0.95)
    differences = [ours[key] - (theirs[key] or 0.0) for key in ours]
    mean, error = fmean(differences), stdev(differences) / 20
    assert found and other_way and found.low is not None and found.high is not None
    assert found.difference == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert (other_way.low, other_way.high) == pytest.approx((-found.high, -found.low))


def test_rewards_are_compared_task_by_task(root: Path) -> None:
    played(root, 0, [0.0] * 10)
    played(root, 1, [0.5] * 9 + [1.0])
    played(root, "large", [1.0] * 9 + [None])
    played(root, "half", [1.0] * 5)
    found = comparison(root, checkpoints=True)
    assert [(row.model, row.tasks, row.failed) for row in found.models] == [
        ("half", 5, 0),
        ("large", 10, 1),
        ("night@1", 10, 0),
        ("night@0", 10, 0),
    ]
    large, half = found.models[1].difference, found.models[0].difference
    assert large and (large.pairs, large.difference, large.low, large.high) == (9, 0.5, 0.5, 0.5)
    assert half and (half.pairs, half.difference, half.low) == (5, 0.5, None)
    texts = [row["less night@1 (95%)"] for row in found.cells()]
    assert texts == ["+0.500 (unsure)", "+0.500 (+0.500 … +0.500)", "—", "-0.550 (-0.650 … -0.500)"]


def test_a_row_says_how_it_was_asked_otherwise(root: Path) -> None:
    played(root, 0, [0.0, 1.0])
    played(root, "thinker", [1.0, 0.0], "warned_refused_temperature", sampling=SamplingSettings(max_tokens=4000))
    assert comparison(root, checkpoints=False).models[-1].model == "thinker (max_tokens 4000, own temperature)"


def test_what_was_played_elsewhere_is_only_counted(root: Path) -> None:
    played(root, "here", [0.0, 1.0])
    played(root, "there", [0.0, 1.0], environment={"name": "tic_tac_toe", "options": {"plays": "O"}})
    found = comparison(root, checkpoints=True)
    assert ([row.model for row in found.models], found.reference, found.elsewhere) == (["here"], None, 1)
    assert not any("less" in name for name in found.cells()[0])


def test_report_and_chart_show_other_models(root: Path) -> None:
    played(root, 0, [0.0, 1.0])
    played(root, "<large>", [1.0, 0.5])
    others: Comparison = comparison(root, checkpoints=False)
    report = Report(run="night", iterations=[], evaluations=[], notes=[], others=others)
    assert "&lt;large&gt;" in curve(report) and "stroke-dasharray" in curve(report)
    assert "| model | held-out reward | tasks | less night@0 (95%) | turns | tokens in + out |" in markdown(
        report, root
    )
    assert "| &lt;large&gt; | 0.750 ± 0.250 | 2 | +0.250 (unsure) | 0.0 | — |" in markdown(report, root)
