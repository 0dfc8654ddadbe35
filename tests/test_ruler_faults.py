"""RULER where the judge fails: bad answers, a server that is busy, broken, slow or gone, a budget that is spent."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from judge_fixtures import (
    COMPLETION_TOKENS,
    KEY_VARIABLE,
    PROMPT_TOKENS,
    JudgeServer,
    Request,
    again,
    fair,
    fault,
    judge,
    run_group,
    shelf,
    table,
)

from steps.common import layout
from steps.common.artifacts import read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs, NightschoolError, ServerFault
from steps.judge.ledger import BudgetSpent

__all__ = ["judge"]


def scores(request: Request, **changed: Any) -> str:
    """A fair answer but for some scores."""
    answer = fair(request)
    for name, score in changed.items():
        answer[name]["score"] = score
    return json.dumps(answer)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda request: "Both are fine.", "it is not a JSON object"),
        (lambda request: '{"attempt_1": {"score": 0.1}', "it is not a JSON object"),
        (lambda request: json.dumps({"attempt_2": {"score": 0.1}}), "there is no score for attempt_1"),
        (lambda request: json.dumps(fair(request) | {"attempt_3": {"score": 1}}), "there is no attempt_3"),
        (lambda request: f'{{"attempt_1": {{"score": 0}}, {json.dumps(fair(request))[1:]}', "attempt_1 is there twice"),
        (lambda request: scores(request, attempt_2=7), "attempt_2.score is 7: Input should be less than or equal to 1"),
        (lambda request: scores(request, attempt_2=-0.1), "attempt_2.score is -0.1: Input should be greater"),
        (lambda request: scores(request, attempt_1=math.nan), "attempt_1.score is nan"),
        (lambda request: scores(request, attempt_1="0.5"), "attempt_1.score is '0.5': Input should be a valid number"),
        (lambda request: scores(request, attempt_1=True), "attempt_1.score is True: Input should be a valid number"),
        (lambda request: json.dumps({"attempt_1": 0.1, "attempt_2": 0.2}), "attempt_1 is 0.1: Input should be"),
    ],
)
def test_a_bad_answer_is_asked_for_again(tmp_path: Path, judge: JudgeServer, bad: Any, complaint: str) -> None:
    judge.reply = lambda request, number: bad(request) if number == 0 else json.dumps(fair(request))
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
        return "I can't tell." if best == task_quality else json.dumps(answer)

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
    judge.reply = lambda request, number: json.dumps(fair(request))
    done = run_group(tmp_path, judge, groups, on_failure="stop", max_reasks=3)
    assert (done.kept, len(judge.requests)) == (2, 5), "it goes on after the three bad answers"


def test_a_busy_or_broken_server_is_asked_again_when_it_says(tmp_path: Path, judge: JudgeServer) -> None:
    faults = [fault(429, "slow down", **{"Retry-After": "1.2"}), fault(503, "broken", **{"Retry-After": "0.01"})]
    judge.reply = lambda request, number: faults[number] if number < 2 else json.dumps(fair(request))
    done = run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)])
    assert (done.kept, len(judge.requests)) == (1, 3)
    manifest = read_manifest(tmp_path / layout.groups(0))
    assert manifest and manifest.seconds >= 1.2, "without that header it would be half a second"
    assert done.judge and done.judge.answers == 1


def failing(task_quality: float, status: int) -> Any:
    def reply(request: Request, number: int) -> str | web.StreamResponse:
        best = max(verdict["score"] for verdict in fair(request).values())
        return (
            fault(status, "as scripted", **{"Retry-After": "0.01"})
            if best == task_quality
            else json.dumps(fair(request))
        )

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


def test_errors_are_one_line(tmp_path: Path, judge: JudgeServer) -> None:
    judge.reply = lambda request, number: fault(500, "two\nlines")
    with pytest.raises(NightschoolError) as error:
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)], request_retries=0)
    assert "\n" not in str(error.value)


def test_a_server_that_wants_to_be_left_alone_is(tmp_path: Path, judge: JudgeServer) -> None:
    judge.reply = lambda request, number: fault(429, "tomorrow", **{"Retry-After": "3600"})
    with pytest.raises(ServerFault, match="HTTP 429: tomorrow"):
        run_group(tmp_path, judge, [shelf("a", 0.1, 0.2)])
    assert len(judge.requests) == 1
