"""RULER: what a judge is asked, what becomes of its scores, and that no answer is paid twice.

The judge is scripted here; tests/test_ruler_vllm.py asks a real model.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from flow_fixtures import Steps, config_of
from judge_fixtures import (
    INSTRUCTIONS,
    KEY,
    JudgeServer,
    again,
    attempt,
    attempts_in,
    fair,
    inputs_for,
    judge,
    run_group,
    shelf,
    table,
)
from run_fixtures import sequence, store_rollouts

from environments import Task, TrajectoryGroup
from flows.config import RunConfig
from flows.rescore import rescore_run
from flows.status import print_status
from flows.train import train
from steps.common import layout
from steps.common.errors import InvalidInputs
from steps.common.query import select
from steps.common.settings import EnvironmentSettings
from steps.common.status import status_of
from steps.group import GROUP, GroupInputs

__all__ = ["judge"]
TEN = (0.35, 0.9, 0.0, 0.55, 1.0, 0.2, 0.75, 0.1, 0.65, 0.45)


def test_ten_attempts_are_ranked_as_the_judge_sees_them(tmp_path: Path, judge: JudgeServer) -> None:
    done = run_group(tmp_path, judge, [shelf("a", *TEN)])
    assert table(tmp_path)["reward"].to_list() == list(TEN)
    assert (done.kept, done.mean_reward) == (1, pytest.approx(sum(TEN) / 10))
    said = select(tmp_path, "SELECT attempt, own_reward, explanation FROM judgements ORDER BY score DESC")
    ranking = sorted(range(10), key=TEN.__getitem__, reverse=True)
    assert said.rows() == [(i, 0.25, f"worth {TEN[i]}") for i in ranking]
    played = select(tmp_path, "SELECT DISTINCT reward FROM trajectories")
    assert played.rows() == [(0.25,)]


def test_what_all_attempts_share_is_told_once(tmp_path: Path, judge: JudgeServer) -> None:
    run_group(tmp_path, judge, [shelf("a", 0.1, 0.2, 0.3)], rubric="Neat {shelves} are best.")
    (request,) = judge.requests
    instructions, document = (message["content"] for message in request["messages"])
    assert json.loads(document)["shared"] == INSTRUCTIONS
    assert [len(messages) for messages in attempts_in(request).values()] == [1, 1, 1]
    assert document.count("Sort this shelf.") == 1
    assert "Neat {shelves} are best." in instructions
    assert request["temperature"] == 0
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["attempt_1", "attempt_2", "attempt_3"]


def test_a_server_without_schemas_is_asked_in_words(tmp_path: Path, judge: JudgeServer) -> None:
    judge.reply = lambda request, number: f"Here you are:\n```json\n{json.dumps(fair(request))}\n```"
    parameters = {"max_completion_tokens": 50, "reasoning_effort": "low", "of_one_server": 1}
    run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], response_format="none", parameters=parameters)
    assert table(tmp_path)["reward"].to_list() == [0.1, 0.2]
    assert judge.requests[0].keys() == {"model", "messages", *parameters}


def test_no_answer_is_paid_twice(tmp_path: Path, judge: JudgeServer) -> None:
    groups = [shelf("a", 0.1, 0.2), shelf("b", 0.3, 0.4)]
    first = run_group(tmp_path, judge, groups)
    assert len(judge.requests) == 2
    assert again(tmp_path, judge, groups) == first
    assert again(tmp_path, judge, groups, base_url=judge.url + "/", request_timeout=9.0) == first
    assert len(judge.requests) == 2
    again(tmp_path, judge, groups, rubric="Another one.")
    again(tmp_path, judge, groups, model="wiser")
    assert len(judge.requests) == 6


@pytest.mark.slow
def test_a_step_that_was_killed_goes_on_after_the_answers_it_has(tmp_path: Path, judge: JudgeServer) -> None:
    judge.delay = 0.2
    groups = [shelf(f"{i}", 0.1, (2 + i) / 10) for i in range(6)]
    inputs = inputs_for(tmp_path, judge, groups)
    (tmp_path / "inputs.json").write_text(inputs.model_dump_json())
    command = ["--root", tmp_path, "--path", layout.groups(0), "--inputs", tmp_path / "inputs.json"]
    with subprocess.Popen([sys.executable, "-m", "steps.group", *map(str, command)]) as step:
        while len(judge.requests) < 3 and step.poll() is None:
            time.sleep(0.01)
        step.kill()
    assert step.returncode == -signal.SIGKILL
    judge.delay = 0.0
    assert run_group(tmp_path, judge, groups).kept == 6
    assert len(judge.requests) == 6 + 1, "only the answer that was under way is paid again"


def test_only_what_changes_scores_is_in_the_fingerprint(tmp_path: Path, judge: JudgeServer) -> None:
    groups = [shelf("a", 0.1, 0.2)]

    def fingerprint(**settings: Any) -> str:
        return inputs_for(tmp_path, judge, groups, **settings).fingerprint()

    same = [{"base_url": "http://elsewhere/v1"}, {"key_variable": None}, {"budget": {"tokens": 1}}, {"max_reasks": 5}]
    assert {fingerprint(**change) for change in same} == {fingerprint()}
    other = [{"model": "wiser"}, {"rubric": "!"}, {"parameters": {}}, {"response_format": "none"}]
    assert len({fingerprint(), *(fingerprint(**change) for change in other)}) == 5


def test_a_run_without_a_judge_is_what_it_was(tmp_path: Path) -> None:
    rollouts = store_rollouts(tmp_path, [shelf("a", 0.1, 0.2)])
    inputs = GroupInputs(iteration=0, rollouts=[rollouts], environment=EnvironmentSettings(name="tic_tac_toe"))
    assert "judge" not in inputs.identity()["settings"]
    assert "judge" not in GROUP.run(inputs, tmp_path, layout.groups(0)).model_dump()
    assert select(tmp_path, "SELECT * FROM judgements").is_empty()


def test_equal_attempts_are_judged_once(tmp_path: Path, judge: JudgeServer) -> None:
    done = run_group(tmp_path, judge, [shelf("a", 0.7, 0.2, 0.7), shelf("b", 0.7, 0.2, 0.2)], concurrency=2)
    assert len(judge.requests) == 1, "both groups come to the same question"
    assert len(attempts_in(judge.requests[0])) == 2
    assert table(tmp_path)["reward"].to_list() == [0.7, 0.2, 0.7, 0.7, 0.2, 0.2]
    assert done.kept == 2


def test_what_can_not_be_compared_is_not_sent(tmp_path: Path, judge: JudgeServer) -> None:
    groups = [shelf("same", 0.5, 0.5), shelf("alone", 0.5), shelf("short", 0.1, 0.2, None), shelf("lost", None, None)]
    done = run_group(tmp_path, judge, groups)
    assert judge.requests == []
    assert done.dropped == {"all_failed": 1, "identical": 1, "short_group": 2}
    assert (done.kept, done.mean_reward, done.judge and done.judge.answers) == (0, None, 0)


def test_failed_attempts_stay_what_they_are(tmp_path: Path, judge: JudgeServer) -> None:
    made = [attempt("a", 0, 0.4, metadata={"shelf": 7}), attempt("a", 1, None), attempt("a", 2, 0.6)]
    done = run_group(tmp_path, judge, [TrajectoryGroup(Task(id="a"), made)], min_attempts=2)
    assert len(attempts_in(judge.requests[0])) == 2
    assert table(tmp_path)["reward"].to_list() == [0.4, None, 0.6]
    assert table(tmp_path)["reason"].to_list() == [None, "failed", None]
    assert done.failures == {"ValueError": 1}
    kept = select(tmp_path, "SELECT metadata, failure_message FROM trajectories ORDER BY attempt").rows()
    assert [json.loads(kept[0][0]), kept[1][1]] == [{"shelf": 7}, "no such move"]


def test_all_conversations_of_an_attempt_are_shown(tmp_path: Path, judge: JudgeServer) -> None:
    several = attempt("a", 0, 0.2, metadata={})
    several.sequences.append(sequence())
    several.messages.extend([{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "quality=0.8"}])
    run_group(tmp_path, judge, [TrajectoryGroup(Task(id="a"), [several, attempt("a", 1, 0.5)])])
    assert len(attempts_in(judge.requests[0])["attempt_1"]) == 3
    assert table(tmp_path)["reward"].to_list() == [0.8, 0.5]


def test_no_key_is_written_down(tmp_path: Path, judge: JudgeServer) -> None:
    run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"judge-key" not in written


def served_as_policy(server: JudgeServer) -> dict[str, str]:
    """Where a step finds the run's own server, which has the base model and an adapter."""
    server.models = [{"id": "run-0000-abc", "parent": "run-base"}, {"id": "run-base", "parent": None}]
    names = ("NIGHTSCHOOL_POLICY_URL", "NIGHTSCHOOL_POLICY_KEY", "NIGHTSCHOOL_POLICY_MODEL")
    return dict(zip(names, (server.url, KEY, "run-0000-abc"), strict=True))


def test_the_base_model_of_the_run_may_judge(
    tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, groups = {"model": None, "base_url": None, "key_variable": None}, [shelf("a", 0.1, 0.2), shelf("b", 0.1, 0.3)]
    with pytest.raises(InvalidInputs, match="NIGHTSCHOOL_POLICY_URL"):
        run_group(tmp_path, judge, groups, **own)
    for name, value in served_as_policy(judge).items():
        monkeypatch.setenv(name, value)
    assert run_group(tmp_path, judge, groups, **own).kept == 2
    assert [request["model"] for request in judge.requests] == ["run-base"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Prefect's own clients are collected rather than closed
def test_a_flow_has_the_server_up_for_a_judge_of_its_own(
    tmp_path: Path, steps: Steps, runs: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("flows.run.environment_of", lambda policy: served_as_policy(judge))
    monkeypatch.setattr("flow_fixtures.group_of", lambda task, rewards: shelf(task, *rewards))
    config = config_of(tmp_path, "iterations=1", "group.judge.budget.tokens=100_000")
    train(config)
    served = [path for path in steps.served if path == layout.checkpoint(0)]
    assert len(served) == 2 + 3, "where the iteration starts; for its evaluation, two shards, and the judge"
    assert len(judge.requests) == 1, "all of its groups come to the same question"
    print_status(status_of(runs / "night"))
    assert "judged with 120 tokens" in capsys.readouterr().out
    then, now = rescore_run(runs / "night", 0)
    assert (now, len(judge.requests)) == (then.model_copy(update={"path": now.path}), 1)


CONFIG = {
    "name": "judged",
    "iterations": 1,
    "environment": {"name": "tic_tac_toe"},
    "model": {"pretrain": {"steps": 1}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": {"judge": {"model": "wise"}}}, "give model and base_url, or neither"),
        (
            {"group": {"judge": {"budget": {"price": 1.0}}}},
            r"a budget\.price needs prices",
        ),
        ({"group": {"judge": {}}, "runtime": {"type": "docker"}}, "group.judge needs the network"),
    ],
)
def test_settings_that_can_not_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(CONFIG | changes)
