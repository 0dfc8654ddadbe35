"""RULER: a judge compares the attempts of a group. Here it is scripted, faults too; test_ruler_vllm asks a real one."""

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from aiohttp import web
from flow_fixtures import Steps, config_of
from judge_fixtures import (
    COMPLETION_TOKENS,
    INSTRUCTIONS,
    KEY,
    KEY_VARIABLE,
    PROMPT_TOKENS,
    JudgeServer,
    Request,
    attempt,
    attempts_in,
    fair,
    fault,
    judge,
    shelf,
)
from run_fixtures import sequence, store_rollouts

from environments import Task, TrajectoryGroup
from flows.config import RunConfig
from flows.rescore import rescore_run
from flows.status import print_status
from flows.train import train
from steps.common import layout, tables
from steps.common.artifacts import Groups, read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs, NightschoolError, ServerFault
from steps.common.query import select
from steps.common.settings import EnvironmentSettings
from steps.common.status import status_of
from steps.group import GROUP, GroupInputs, GroupSettings
from steps.judge.ledger import BudgetSpent
from steps.judge.settings import JudgeSettings

__all__ = ["judge"]
TEN = (0.35, 0.9, 0.0, 0.55, 1.0, 0.2, 0.75, 0.1, 0.65, 0.45)


def inputs_for(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> GroupInputs:
    rollouts = store_rollouts(root, groups)
    own = {"model": "wise", "base_url": server.url, "key_variable": KEY_VARIABLE, "concurrency": 1}
    rule = GroupSettings(
        min_attempts=settings.pop("min_attempts", None), judge=JudgeSettings.model_validate(own | settings)
    )
    return GroupInputs(
        iteration=0, rollouts=[rollouts], environment=EnvironmentSettings(name="tic_tac_toe"), settings=rule
    )


def run_group(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> Groups:
    return GROUP.run(inputs_for(root, server, groups, **settings), root, layout.groups(0))


def again(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> Groups:
    """The same once more, as after a rewind."""
    if (root / layout.groups(0)).exists():
        (root / layout.groups(0)).rename(root / f"aside-{len(list(root.iterdir()))}")
    return run_group(root, server, groups, **settings)


def table(root: Path) -> pl.DataFrame:
    return tables.read([root / layout.groups(0) / tables.GROUPS], tables.GROUP_COLUMNS)


def told(answer: dict[str, Any]) -> str:
    return json.dumps(answer)


def scores(request: Request, **changed: Any) -> str:
    """A fair answer but for some scores."""
    answer = fair(request)
    for name, score in changed.items():
        answer[name]["score"] = score
    return json.dumps(answer)


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
    judge.reply = lambda request, number: f"Here you are:\n```json\n{told(fair(request))}\n```"
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


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda request: "Both are fine.", "it is not a JSON object"),
        (lambda request: '{"attempt_1": {"score": 0.1}', "it is not a JSON object"),
        (lambda request: told({"attempt_2": {"score": 0.1}}), "there is no score for attempt_1"),
        (lambda request: told(fair(request) | {"attempt_3": {"score": 1}}), "there is no attempt_3"),
        (lambda request: f'{{"attempt_1": {{"score": 0}}, {told(fair(request))[1:]}', "attempt_1 is there twice"),
        (lambda request: scores(request, attempt_2=7), "attempt_2.score is 7: Input should be less than or equal to 1"),
        (lambda request: scores(request, attempt_2=-0.1), "attempt_2.score is -0.1: Input should be greater"),
        (lambda request: scores(request, attempt_1=math.nan), "attempt_1.score is nan"),
        (lambda request: scores(request, attempt_1="0.5"), "attempt_1.score is '0.5': Input should be a valid number"),
        (lambda request: scores(request, attempt_1=True), "attempt_1.score is True: Input should be a valid number"),
        (lambda request: told({"attempt_1": 0.1, "attempt_2": 0.2}), "attempt_1 is 0.1: Input should be"),
    ],
)
def test_a_bad_answer_is_asked_for_again(tmp_path: Path, judge: JudgeServer, bad: Any, complaint: str) -> None:
    judge.reply = lambda request, number: bad(request) if number == 0 else told(fair(request))
    done = run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)])
    first, second = judge.requests
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": bad(first)}
    assert complaint in second["messages"][3]["content"]
    assert table(tmp_path)["reward"].to_list() == [0.1, 0.2]
    assert done.judge and (done.judge.answers, done.judge.tokens) == (2, 2 * (PROMPT_TOKENS + COMPLETION_TOKENS))


def test_an_answer_that_was_cut_off_is_asked_for_again(tmp_path: Path, judge: JudgeServer) -> None:
    judge.finish_reason = "length"
    with_more = {"on_failure": "stop", "max_reasks": 1}
    with pytest.raises(InvalidInputs, match="greatest length"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], **with_more)
    assert "explain more briefly" in judge.requests[1]["messages"][3]["content"]


def spoiled(task_quality: float) -> Any:
    """A judge that never answers well about the group whose best is of this quality."""

    def reply(request: Request, number: int) -> str:
        answer = fair(request)
        best = max(verdict["score"] for verdict in answer.values())
        return "I can't tell." if best == task_quality else told(answer)

    return reply


def test_a_group_that_can_not_be_judged_is_dropped_and_counted(tmp_path: Path, judge: JudgeServer, capsys: Any) -> None:
    judge.reply = spoiled(0.9)
    groups = [shelf("a", 0.1, 0.2), shelf("b", 0.1, 0.9)]
    done = run_group(tmp_path, judge, groups)
    assert len(judge.requests) == 1 + 3
    assert (done.kept, done.dropped) == (1, {"judge_failed": 1})
    rows = table(tmp_path).filter(task_id="b")
    assert rows["reason"].str.starts_with("judge_failed: it is not a JSON object").all()
    assert rows["reward"].to_list() == [None, None]
    assert "judge failed: task b: it is not a JSON object" in capsys.readouterr().out
    again(tmp_path, judge, groups)
    assert len(judge.requests) == 4, "bad answers are paid once, too"


def test_a_judge_may_have_to_answer(tmp_path: Path, judge: JudgeServer) -> None:
    judge.reply = spoiled(0.9)
    groups = [shelf("a", 0.1, 0.2), shelf("b", 0.1, 0.9)]
    with pytest.raises(InvalidInputs, match=r"failed for 1 of 2 groups, as for task b: .*raise group.judge.max_reasks"):
        run_group(tmp_path, judge, groups, on_failure="stop")
    assert not (tmp_path / layout.groups(0)).exists()
    judge.reply = lambda request, number: told(fair(request))
    done = run_group(tmp_path, judge, groups, on_failure="stop", max_reasks=3)
    assert (done.kept, len(judge.requests)) == (2, 5), "it goes on after the three bad answers"


def test_a_busy_or_broken_server_is_asked_again_when_it_says(tmp_path: Path, judge: JudgeServer) -> None:
    faults = [fault(429, "slow down", **{"Retry-After": "1.2"}), fault(503, "broken", **{"Retry-After": "0.01"})]
    judge.reply = lambda request, number: faults[number] if number < 2 else told(fair(request))
    done = run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)])
    assert (done.kept, len(judge.requests)) == (1, 3)
    manifest = read_manifest(tmp_path / layout.groups(0))
    assert manifest and manifest.seconds >= 1.2, "without that header it would be half a second"
    assert done.judge and done.judge.answers == 1


def failing(task_quality: float, status: int) -> Any:
    def reply(request: Request, number: int) -> str | web.StreamResponse:
        best = max(verdict["score"] for verdict in fair(request).values())
        return fault(status, "as scripted", **{"Retry-After": "0.01"}) if best == task_quality else told(fair(request))

    return reply


@pytest.mark.parametrize(("status", "sent"), [(429, 3), (500, 3), (400, 1)])
def test_no_answer_after_all_retries_drops_the_group(
    tmp_path: Path, judge: JudgeServer, status: int, sent: int
) -> None:
    judge.reply = failing(0.9, status)
    done = run_group(tmp_path, judge, [shelf("a", 0.1, 0.9), shelf("b", 0.1, 0.2)], request_retries=2)
    assert (done.kept, done.dropped, len(judge.requests)) == (1, {"judge_failed": 1}, sent + 1)
    assert table(tmp_path)["reason"][0] == f"judge_failed: HTTP {status}: as scripted"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (lambda: fault(503, "as scripted"), "HTTP 503: as scripted"),
        (lambda: web.Response(text="<html>hello</html>", content_type="text/html"), "no chat completion"),
        (lambda: web.Response(text='{"choices": [', content_type="application/json"), "no JSON"),
        (lambda: web.json_response({"choices": None}), "no chat completion"),
    ],
)
def test_a_judge_that_answers_nobody_stops_the_step(tmp_path: Path, judge: JudgeServer, reply: Any, why: str) -> None:
    judge.reply = lambda request, number: reply()
    with pytest.raises(ServerFault, match=f"failed for 2 of 2 groups, as for task a: .*{why}"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2), shelf("b", 0.1, 0.3)], request_retries=0)


def test_a_judge_that_takes_too_long_is_given_up(tmp_path: Path, judge: JudgeServer) -> None:
    judge.delay = 5.0
    with pytest.raises(ServerFault, match=r"no answer within 0\.2 s"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], request_retries=0, request_timeout=0.2)


def test_a_judge_that_is_not_there_is_given_up(tmp_path: Path, judge: JudgeServer) -> None:
    with pytest.raises(ServerFault, match="Connection error"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], request_retries=0, base_url="http://127.0.0.1:9/v1")


def test_a_wrong_key_stops_at_once(tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [shelf("a", 0.1, 0.2), shelf("b", 0.1, 0.3)]
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(InvalidInputs, match=f"refuses .* its key, from {KEY_VARIABLE} .*HTTP 401: wrong key"):
        run_group(tmp_path, judge, groups)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidInputs, match=f"{KEY_VARIABLE}, which group.judge.key_variable names, is not set"):
        run_group(tmp_path, judge, groups)
    assert judge.requests == []


@pytest.mark.parametrize(
    "limits",
    [
        {"budget": {"tokens": 2 * (PROMPT_TOKENS + COMPLETION_TOKENS)}},
        {"budget": {"price": 0.0024}, "prices": {"prompt": 10, "completion": 10}},
    ],
)
def test_a_budget_stops_before_it_is_exceeded(tmp_path: Path, judge: JudgeServer, limits: dict[str, Any]) -> None:
    groups = [shelf(f"{i}", 0.1, (2 + i) / 10) for i in range(4)]
    for _ in range(2):
        with pytest.raises(BudgetSpent, match=r"the judge has spent .* raise it and run the same command"):
            run_group(tmp_path, judge, groups, **limits)
        assert len(judge.requests) == 2
    done = run_group(tmp_path, judge, groups, prices={"prompt": 10, "completion": 10})
    assert (done.kept, len(judge.requests)) == (4, 4)
    assert done.judge and (done.judge.prompt_tokens, done.judge.completion_tokens) == (400, 80)
    manifest = read_manifest(tmp_path / layout.groups(0))
    assert manifest and manifest.measured["judge_price"] == pytest.approx(0.0048)


def test_answers_under_way_are_kept_when_the_budget_is_spent(tmp_path: Path, judge: JudgeServer) -> None:
    judge.delay = 0.3
    groups = [shelf(f"{i}", 0.1, (2 + i) / 10) for i in range(6)]
    with pytest.raises(BudgetSpent):
        run_group(tmp_path, judge, groups, concurrency=3, budget={"tokens": 1})
    assert (len(judge.requests), len(list((tmp_path / layout.JUDGE).iterdir()))) == (3, 3)


def test_a_budget_needs_a_server_that_counts(tmp_path: Path, judge: JudgeServer) -> None:
    judge.usage = False
    with pytest.raises(InvalidInputs, match="counts no tokens"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], budget={"tokens": 1000})
    assert run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)]).kept == 1


def test_a_damaged_answer_is_named(tmp_path: Path, judge: JudgeServer) -> None:
    groups = [shelf("a", 0.1, 0.2)]
    run_group(tmp_path, judge, groups)
    (file,) = (tmp_path / layout.JUDGE).iterdir()
    file.write_text(file.read_text()[:20])
    with pytest.raises(CorruptArtifact, match=rf"{file.name} is not an answer of the judge .*delete it"):
        again(tmp_path, judge, groups)


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


def test_errors_are_one_line(tmp_path: Path, judge: JudgeServer) -> None:
    judge.reply = lambda request, number: fault(500, "two\nlines")
    with pytest.raises(NightschoolError) as error:
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], request_retries=0)
    assert "\n" not in str(error.value)
