"""What `nightschool evaluate` may be asked, who is meant by it, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from flow_fixtures import CONFIG

from flows.config import RunConfig
from flows.contest import Base, Contest, Foreign, Guest, Own
from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs
from steps.common.runs import RUNS, RunRecord, write_record
from steps.common.step import Inputs, Step, Workspace
from steps.evaluate_model import ModelServer

AT = ModelServer(base_url="http://127.0.0.1:9/v1")


def ask(**question: Any) -> Contest:
    blank = {"run": None, "env": None, "iteration": None, "model": None, "server": None, "overrides": ()}
    return Contest.of(**blank | question)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, `night` and `day`, with checkpoints 0 and 1 each."""
    monkeypatch.setenv(RUNS, str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("night", "day"):
        (tmp_path / f"{name}.toml").write_text(CONFIG.replace('"night"', f'"{name}"'))
        config = RunConfig.from_toml(tmp_path / f"{name}.toml")
        write_record(tmp_path / name, RunRecord(config=config.model_dump(mode="json"), versions={}))
        for i in (0, 1):
            facts = {"iteration": i, "base_model": "model", "step": i, "updated": True, "metrics": {}}
            checkpoint(tmp_path / name, i, facts)
    return tmp_path


def checkpoint(root: Path, i: int, facts: dict[str, Any]) -> None:
    def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        (workspace.out / "adapter").write_text(f"{root.name} {i}")
        return facts

    Step("train", Inputs, Checkpoint, work).run(Inputs(), root, layout.checkpoint(i))


def test_who_is_meant(runs: Path) -> None:
    assert ask(run="night").player == Own(1)
    assert ask(run="night", iteration=0).player == Own(0)
    assert ask(run="night", model="night@0").player == Own(0)
    assert ask(run="night", model="base").player == Base()
    guest = ask(run="night", model="day@1").player
    assert isinstance(guest, Guest) and (guest.name, guest.root, guest.checkpoint.iteration) == (
        "day@1",
        runs / "day",
        1,
    )
    for name in ("base", "day@1", "claude@20240620"):  # a server is given: it knows what is meant
        assert ask(run="night", model=name, server=AT).player == Foreign(name, AT)


def test_without_a_server_openais_is_meant(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputs, match=r"OPENAI_API_KEY, which holds the key of https://api.openai.com/v1"):
        ask(run="night", model="gpt-4.1-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert ask(run="night", model="gpt-4.1-mini").player == Foreign("gpt-4.1-mini", ModelServer())


def test_an_environment_needs_no_run(runs: Path) -> None:
    contest = ask(env="tic_tac_toe", model="m", server=AT, overrides=["evaluate.tasks=8", "sampling.max_tokens=9"])
    assert (contest.root, contest.is_new) == (runs / "tic_tac_toe", True)
    assert (contest.config.evaluate.tasks, contest.config.sampling.max_tokens) == (8, 9)
    assert ask(env="environments.tic_tac_toe:TicTacToe", model="m", server=AT).root.name == (
        "environments.tic_tac_toe-TicTacToe"
    )


def test_an_environment_with_few_tasks_is_played_whole(runs: Path) -> None:
    contest = ask(env="agents:Talk", model="m", server=AT, overrides=["environment.options.count=5"])
    assert contest.config.evaluate.tasks == 5


def test_a_trained_run_keeps_its_record(runs: Path) -> None:
    assert not ask(env=str(runs / "night.toml"), model="m", server=AT).is_new
    assert not ask(run="night", model="m", server=AT).is_new


@pytest.mark.parametrize(
    "question, message",
    [
        ({}, "name a run, or an environment with --env"),
        ({"run": "night", "env": "tic_tac_toe", "model": "m"}, "name a run, or an environment"),
        ({"env": "tic_tac_toe"}, "say with --model which model"),
        ({"run": "night", "server": AT}, "say with --model which model"),
        ({"run": "night", "model": "base", "iteration": 1}, "--iteration and --model name a model each"),
        ({"run": "dusk", "model": "base"}, "there is no run 'dusk'"),
        ({"run": "night", "model": "dusk@1"}, "there is no run 'dusk'"),
        ({"run": "night", "model": "day@7"}, "no finished checkpoint 7"),
        ({"env": "tic_tac_toe", "model": "base"}, "tic_tac_toe has no model to train"),
        ({"env": "chess", "model": "m", "server": AT}, "there is no environment 'chess'"),
        ({"env": "nowhere.toml", "model": "m", "server": AT}, "can't read nowhere.toml"),
        ({"run": "night", "model": "m", "server": AT, "overrides": ["evaluate.tasks=999"]}, "has 256 tasks"),
        (
            {"run": "night", "model": "m", "server": AT, "overrides": ["runtime.type=docker"]},
            "rollouts can't reach http:",
        ),
        ({"run": "night", "model": "day@1", "overrides": ["runtime.type=pool"]}, "served on this machine only"),
    ],
)
def test_what_makes_no_sense_is_refused(runs: Path, question: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputs, match=message):
        ask(**question)
    assert not (runs / "tic_tac_toe").exists()
