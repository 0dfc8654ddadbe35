"""Held-out tasks played by a model behind somebody's server: what works, and each way in which such servers differ."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from judge_fixtures import COMPLETION_TOKENS, KEY, KEY_VARIABLE, PROMPT_TOKENS, JudgeServer, fault
from rollout_fixtures import QUICK, SAMPLING

from environments import load
from steps.agent.foreign import seconds_in
from steps.common import tables
from steps.common.artifacts import ModelEvaluation, OtherModel, read_manifest
from steps.common.errors import InvalidInputs, ServerFault, TooManyFailures
from steps.common.settings import EnvironmentSettings
from steps.evaluate_model import EVALUATE_MODEL, EvaluateModelInputs, ModelServer

PATH = "evaluations/model-wise"
TALK = EnvironmentSettings(name="agents:Talk", options={"turns": 2, "count": 4})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """Any server with OpenAI's API: it answers with `well`."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with JudgeServer() as server:
        server.reply = lambda request, number: "well"
        yield server


def inputs_for(there: JudgeServer, environment: EnvironmentSettings = TALK, /, **changes: Any) -> EvaluateModelInputs:
    fields = {
        "model": OtherModel(name="wise"),
        "server": ModelServer(base_url=there.url, key_variable=KEY_VARIABLE),
        "tasks": load(environment.name, **environment.options).tasks("test"),
        "environment": environment,
        "sampling": SAMPLING,
        "seed": 7,
        "limits": QUICK,
    }
    return EvaluateModelInputs.model_validate(fields | changes)


def play(root: Path, there: JudgeServer, /, *environment: EnvironmentSettings, **changes: Any) -> ModelEvaluation:
    return EVALUATE_MODEL.run(inputs_for(there, *environment, **changes), root, PATH)


def measured(root: Path) -> dict[str, float]:
    manifest = read_manifest(root / PATH)
    assert manifest
    return manifest.measured


def test_a_model_plays_as_checkpoints_do_and_its_tokens_are_counted(tmp_path: Path, server: JudgeServer) -> None:
    prices = {"prompt": 2.0, "completion": 8.0}
    at = ModelServer(base_url=server.url, key_variable=KEY_VARIABLE, prices=prices)
    made = play(tmp_path, server, server=at)
    assert (made.model.name, made.tasks, made.failed, made.reward) == ("wise", 4, 0, 4.0)
    assert (made.usage.answers, made.usage.prompt_tokens, made.usage.completion_tokens) == (8, 800, 160)
    assert measured(tmp_path)["price"] == pytest.approx((800 * 2.0 + 160 * 8.0) / 1e6)
    for request in server.requests:
        assert request.keys() == {"model", "messages", "temperature", "max_tokens", "seed"}
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("wise", 0.7, 120)
    assert len({request["seed"] for request in server.requests}) == 8
    frame = tables.read([tmp_path / PATH / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    first = tables.groups_of_frame(frame)[0].trajectories[0]
    assert [message["content"] for message in first.messages] == ["test-0: turn 0", "well", "test-0: turn 1", "well"]
    assert (first.sequences, first.turns) == ([], 2)
    assert (first.prompt_tokens, first.completion_tokens) == (2 * PROMPT_TOKENS, 2 * COMPLETION_TOKENS)
    assert KEY not in "".join(file.read_text(errors="replace") for file in (tmp_path / PATH).iterdir())


def test_address_key_and_limits_do_not_make_another_evaluation(tmp_path: Path, server: JudgeServer) -> None:
    made = play(tmp_path, server)
    asked = len(server.requests)
    elsewhere = ModelServer(base_url="http://127.0.0.1:1/v1")
    assert play(tmp_path, server, server=elsewhere) == made
    with pytest.raises(InvalidInputs, match="made from other inputs"):
        play(tmp_path, server, model=OtherModel(name="other"))
    assert len(server.requests) == asked


def test_finished_tasks_are_not_paid_again(tmp_path: Path, server: JudgeServer) -> None:
    server.reply = lambda request, number: "well" if number < 4 else fault(500, "gone")
    with pytest.raises(ServerFault, match="gone"):
        play(tmp_path, server, limits=QUICK.model_copy(update={"concurrency": 1, "request_retries": 0}))
    server.requests.clear()
    server.reply = lambda request, number: "well"
    assert play(tmp_path, server).usage.answers == 8
    assert len(server.requests) == 4


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(
    tmp_path: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = {"Retry-After": "0.3"}
    server.reply = lambda request, number: fault(429, "slow down", **busy) if number < 6 else "well"
    started = time.monotonic()
    assert play(tmp_path, server, limits=QUICK.model_copy(update={"request_retries": 0})).failed == 0
    assert time.monotonic() - started > 0.3
    assert measured(tmp_path)["warned_busy"] == 6
    assert "slow down" in capsys.readouterr().err


def test_a_server_that_is_busy_for_hours_is_given_up(tmp_path: Path, server: JudgeServer) -> None:
    server.reply = lambda request, number: fault(429, "come back tomorrow", **{"Retry-After": "7200"})
    with pytest.raises(ServerFault, match=r"asks for 7200 s of patience: HTTP 429: come back tomorrow"):
        play(tmp_path, server)


@pytest.mark.parametrize("header, seconds", [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("soon", None), ("", None)])
def test_retry_after_is_understood(header: str, seconds: float | None) -> None:
    assert seconds_in(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert seconds_in(header) == pytest.approx(60, abs=2)


def refuses(name: str) -> Any:
    """A model that knows no such parameter."""

    def reply(request: dict[str, Any], number: int) -> str | web.StreamResponse:
        return fault(400, f"Unsupported parameter: '{name}' is not supported.") if name in request else "well"

    return reply


@pytest.mark.parametrize(
    "name, instead",
    [("max_tokens", {"max_completion_tokens": 120}), ("temperature", {}), ("seed", {})],
)
def test_what_a_model_refuses_is_left_out_and_told(
    tmp_path: Path, server: JudgeServer, name: str, instead: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = refuses(name)
    assert play(tmp_path, server, limits=QUICK.model_copy(update={"concurrency": 1})).failed == 0
    assert len(server.requests) == 9  # it learns once
    assert all(name not in request and request.items() >= instead.items() for request in server.requests[1:])
    assert measured(tmp_path)[f"warned_refused_{name}"] == 1
    assert f"the server refuses {name}" in capsys.readouterr().err


def test_another_refusal_is_the_agents_failure(tmp_path: Path, server: JudgeServer) -> None:
    server.reply = lambda request, number: fault(400, "this prompt is not allowed")
    with pytest.raises(TooManyFailures, match=r"this prompt is not allowed \(HTTP 400\)"):
        play(tmp_path, server)
    server.reply = lambda request, number: (
        fault(400, "no") if request["messages"][0]["content"].startswith("test-0") else "well"
    )
    made = play(tmp_path, server, max_failed_fraction=0.5)
    assert (made.failed, made.failures) == (1, {"RequestRefused": 1})


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_ends_it_at_once(tmp_path: Path, server: JudgeServer, status: int) -> None:
    server.reply = lambda request, number: fault(status, f"no such thing, {KEY}")
    with pytest.raises(InvalidInputs, match=rf"refuses the key or the model wise: HTTP {status}: no such thing, …$"):
        play(tmp_path, server, limits=QUICK.model_copy(update={"concurrency": 1}))
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", ["", "no JSON", "[]", "{}", '{"choices": []}', '{"choices": [{"message": "hi"}]}'])
def test_an_answer_that_is_none_is_the_servers_fault(tmp_path: Path, server: JudgeServer, answer: str) -> None:
    server.reply = lambda request, number: web.Response(text=answer, content_type="application/json")
    limits = QUICK.model_copy(update={"request_retries": 0, "server_retries": 0})
    with pytest.raises(ServerFault, match="that is no"):
        play(tmp_path, server, limits=limits)


def test_a_server_that_counts_no_tokens_is_played_with_and_told(
    tmp_path: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.usage = False
    made = play(tmp_path, server)
    assert (made.usage.answers, made.usage.tokens) == (8, 0)
    assert "does not say how many tokens" in capsys.readouterr().err


def test_what_only_vllm_knows_and_what_bends_is_not_sent(tmp_path: Path, server: JudgeServer) -> None:
    play(tmp_path, server, EnvironmentSettings(name="agents:Bends", options={"count": 2}))
    assert all("top_p" not in request for request in server.requests)


def test_a_missing_key_is_said_and_no_other_is_sent(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "precious")
    with pytest.raises(InvalidInputs, match="refuses the key"):
        play(tmp_path, server, server=ModelServer(base_url=server.url))
    assert ModelServer(base_url=server.url).endpoint("wise").key == "none"
    assert ModelServer().endpoint("gpt").key == "precious"
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidInputs, match=f"{KEY_VARIABLE}, which holds the key of .* is not set"):
        play(tmp_path, server)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://a/v1", "https://me:secret@host/v1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        ModelServer(base_url=address)
