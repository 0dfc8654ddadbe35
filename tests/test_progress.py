"""How far a step is: told by its lines, shown by Prefect, and never a reason to fail."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows import progress
from steps.common.progress import Progress, share_done

LINES = ["6 of 8 groups are finished already", "1/6 rollouts · reward 0.250 · 0:41 left", "done soon"]


def test_a_line_of_progress_tells_the_share(capsys: pytest.CaptureFixture[str]) -> None:
    told = Progress(8, "rollouts", every=0)
    told.show(2, reward="0.5", speed="12 tokens/s")
    told.show(8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "8/8 rollouts"
    assert [share_done(line) for line in lines] == [0.25, 1.0]


@pytest.mark.parametrize(
    "line", ["", "3 of 8 groups are finished already", "1/0 steps", "9/8 steps", "at 1/2 steps", "1/2 a b"]
)
def test_no_other_line_does(line: str) -> None:
    assert share_done(line) is None


def artifacts(key: str) -> list[Any]:
    """Its versions, the oldest first."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return sorted(found, key=lambda artifact: artifact.created)


def in_tasks(*work: Callable[[], None]) -> None:
    """Runs each in a task of a flow."""

    @task(task_run_name="rollout 0003/001", persist_result=False)
    def one(work: Callable[[], None]) -> None:
        work()

    @flow(persist_result=False)
    def all_of_them() -> None:
        for each in work:
            one.submit(each).result()

    all_of_them()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_prefect_shows_how_far_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    seen, said = list[tuple[float, str]](), list[str]()

    def look() -> None:
        newest = artifacts("early-bird-2-rollout")[-1]
        seen.append((newest.data, newest.description))

    def step() -> None:
        with progress.shown("Early_Bird.2", "rollout", said.append) as hear:
            look()
            for line in LINES:
                hear(line)
                look()
        look()

    in_tasks(step, step)
    assert said == LINES * 2
    what = "rollout 0003/001 of the run Early_Bird.2"
    told = (16.7, f"{what}: {LINES[1]}")
    assert seen == [(0.0, what), (0.0, what), told, told, (100.0, f"{what}: {LINES[1]}")] * 2
    assert len(artifacts("early-bird-2-rollout")) == 2  # a version a task run, under one key


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_prefect_is_not_asked_for_every_line_nor_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(progress.Artifact, "_send", lambda artifact, percent, description: asked.append(percent))

    def steps() -> None:
        with progress.shown("crowd", "rollout", print) as hear:
            for done in range(1, 64):
                hear(f"{done}/64 rollouts")
        with progress.shown("crowd", "group", print) as hear:
            hear("1/64 groups")

    in_tasks(steps)
    assert asked == [0.0, 100.0]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_prefect_does_not_take_stops_no_step_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    said = list[str]()

    def step() -> None:
        with progress.shown("gone", "train", said.append) as hear:
            with get_client(sync_client=True) as client:
                client.delete_artifact(artifacts("gone-train")[0].id)
            hear("1/4 steps")
            hear("2/4 steps")

    in_tasks(step)
    assert said[0] == "1/4 steps" and said[2:] == ["2/4 steps"]
    assert re.fullmatch(
        "Prefect does not show the progress of this step any more: .* '404 Not Found' for url .*", said[1]
    )
