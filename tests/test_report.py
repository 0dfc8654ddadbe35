"""The report: what it says of a run, that its curve is a curve, and that Prefect keeps its versions."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from flow_fixtures import Steps, config_of
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.train import train
from steps.common.report import IterationReport, Report, cells, curve, report_of, write_html
from steps.common.status import EvaluationStatus

ROW = IterationReport(
    iteration=0,
    reward=0.5,
    held_out=None,
    kept=3,
    groups=4,
    failed=1,
    kl=0.00123,
    clip_fraction=None,
    seconds={"rollout": 61.4, "group": 0.2},
)


def report(*rewards: float | None) -> Report:
    rows = [ROW.model_copy(update={"iteration": i, "reward": reward}) for i, reward in enumerate(rewards)]
    evaluations = [EvaluationStatus(iteration=2, reward=1, stderr=0.5, n=9)]
    return Report(run="<night>", iterations=rows, evaluations=evaluations, notes=["champion: <2>"])


def test_a_row_is_readable() -> None:
    assert cells(ROW) == {
        "iteration": "0",
        "reward": "0.500",
        "held-out": "—",
        "groups kept": "3 of 4",
        "failed rollouts": "1",
        "KL": "0.0012",
        "clip fraction": "—",
        "seconds": "rollout 61, group 0.2",
    }


def test_the_curve_shows_every_reward_in_its_place() -> None:
    picture = ET.fromstring(curve(report(0.0, None, 1.5)))
    line = picture.find("{*}polyline")
    assert line is not None
    assert line.get("points") == "40.0,220.0 680.0,40.0"  # from the lower left corner to the upper right one
    circle = picture.find("{*}circle")
    assert circle is not None and (circle.get("cx"), circle.get("cy")) == ("680.0", "100.0")


def test_a_single_reward_is_a_dot() -> None:
    dots = ET.fromstring(curve(report(0.5))).findall("{*}circle")
    assert [(dot.get("cx"), dot.get("cy")) for dot in dots] == [
        ("680.0", "130.0"),
        ("40.0", "220.0"),
    ]  # held out; trained


@pytest.mark.parametrize("rewards", [(), (None,), (0.25,), (0.25, 0.25)])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, rewards: tuple[float | None, ...]) -> None:
    begun = report(*rewards).model_copy(update={"evaluations": []})
    text = write_html(tmp_path, begun).read_text()
    assert "&lt;night&gt;" in text and "<night>" not in text
    assert "champion: &lt;2&gt;" in text
    assert ("<svg" in text) == (rewards not in [(), (None,)])
    assert "nan" not in text


@pytest.fixture
def artifacts() -> Any:
    """Reads an artifact's versions, the newest first."""

    def read(key: str) -> list[Any]:
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        return sorted(found, key=lambda artifact: artifact.created, reverse=True)

    return read


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_iteration_adds_a_version(steps: Steps, runs: Path, tmp_path: Path, artifacts: Any) -> None:
    config = config_of(tmp_path, "name=Early_Bird.2")
    train(config)
    root = runs / "Early_Bird.2"
    told = report_of(root)
    assert [(row.iteration, row.reward, row.held_out, row.kept) for row in told.iterations] == [
        (0, 0.5, 0.5, 4),
        (1, 0.5, 0.5, 4),
    ]
    assert list(told.iterations[0].seconds) == ["rollout", "group", "collate", "train", "evaluate"]
    assert "<polyline" in (root / "report.html").read_text()

    rewards, tables = artifacts("early-bird-2-rewards"), artifacts("early-bird-2-iterations")
    assert len(rewards) == len(tables) == 3  # after each iteration, and after the last evaluation
    assert re.search(r"!\[rewards\]\(data:image/svg\+xml;base64,[\w+/=]+\)", rewards[0].data)
    assert "| 2 | 0.500 ± 0.100 | 3 |" in rewards[0].data
    assert '"iteration": "1"' in tables[0].data
    assert all(f"`{root}/report.html`" in told for told in (rewards[0].data, tables[0].description))

    train(config)  # nothing is new
    assert len(artifacts("early-bird-2-rewards")) == 3


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_report_that_fails_stops_nothing(
    steps: Steps, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(root: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("flows.tasks.show_report", fail)
    monkeypatch.setattr("flows.tasks.report.retries", 0)
    assert [evaluation.iteration for evaluation in train(config_of(tmp_path))] == [0, 1, 2]
