"""What one sees in Prefect's UI of a run that was trained, and trained again: in a real browser, of our own server."""

from pathlib import Path

import pytest
from ui_fixtures import Page, page, trained

__all__ = ["page", "trained"]  # fixtures

GREEN = "g > 140 && r < 80 && b < 120"
"""Of a task that ended well; the line below the graph has it too, for as long as the flow run did not."""
BLUE = "b > 180 && r < 90 && g < 130"
"""Of the training rewards' line."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the server is not this process's to wait for
def test_a_run_can_be_watched(page: Page, runs: Path) -> None:
    first, second = page.wait(lambda: two_runs_all_told(page))
    latest = {row["key"]: row["latest_id"] for row in page.read("artifacts/latest/filter")}

    page.open(f"runs/flow-run/{first}")
    page.wait(lambda: "Runs\nnight" in page.text(".page-heading__crumbs"))
    page.wait(lambda: page.pixels(page.find(".run-graph canvas"), GREEN) > 3000)  # its tasks as bars
    page.find("#artifacts").click()
    page.wait(lambda: {"night-rewards", "night-iterations", "night-rollout"} <= lines(page, "#artifacts-content"))
    assert page.errors() == []

    page.open(f"runs/flow-run/{second}")
    page.find("#task-runs").click()
    page.wait(lambda: {"rollout 0001/001", "train 0001"} <= lines(page, "#task-runs-content"))
    assert {badge.text for badge in page.all("#task-runs-content .state-badge")} == {"Reused"}
    assert page.errors() == []

    page.open(f"artifacts/artifact/{latest['night-rewards']}")
    curve = page.find("img[alt=rewards]")
    page.wait(lambda: page.pixels(curve, BLUE) > 300)
    assert {"2 0.500 ± 0.100 3", f"Every iteration: {runs}/night/report.html"} <= lines(page)
    assert page.errors() == []

    page.open(f"artifacts/artifact/{latest['night-iterations']}")
    page.find("tbody tr")
    head, newest = ([cell.text for cell in page.all(f"{row} > *")] for row in ("thead tr", "tbody tr:first-child"))
    told = dict(zip(head, newest, strict=True))
    seconds = told.pop("seconds")
    assert told == {
        "iteration": "1",
        "reward": "0.500",
        "held-out": "0.500",
        "groups kept": "4 of 4",
        "failed rollouts": "0",
        "KL": "—",
        "clip fraction": "—",
    }
    assert [part.split()[0] for part in seconds.split(", ")] == ["rollout", "group", "collate", "train", "evaluate"]
    assert page.errors() == []

    page.open(f"artifacts/artifact/{latest['night-rollout']}")
    page.wait(lambda: "Progress: 100%" in lines(page))
    assert any(line.startswith("rollout 0001/00") and line.endswith("of the run night") for line in lines(page))
    assert page.errors() == []


def two_runs_all_told(page: Page) -> list[str] | None:
    """The flow runs in their order, once the server has heard of the end of all their tasks."""
    tasks = page.read("task_runs/filter")
    if len(tasks) < 36 or any(task["end_time"] is None for task in tasks):
        return None
    return [run["id"] for run in page.read("flow_runs/filter", sort="START_TIME_ASC")]


def lines(page: Page, selector: str = "body") -> set[str]:
    return set(page.text(selector).splitlines())
