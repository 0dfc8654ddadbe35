"""The recorder keeps exact tokens whichever way an agent reaches the model, and lets no agent bend the sampling."""

import asyncio
import math
from typing import Any

import pytest
from agents import CALL, use_tool_by_chat, use_tool_by_client
from openai import AsyncOpenAI, BadRequestError
from rollout_fixtures import CHECKPOINT, QUICK, SAMPLING, recording, stub
from stub_server import END, MODEL, Request, StubServer, render, render_last_turn

from environments import Policy, TokenSequence
from environments.base import RequestRefused
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.sequences import InexactTokens
from steps.agent.upstream import Endpoint
from steps.common.errors import InvalidInputs, ServerFault

__all__ = ["CHECKPOINT", "stub"]
HELLO = [{"role": "user", "content": "hello"}]


def sequences(recorder: Recorder) -> list[TokenSequence]:
    return [conversation.sequence for conversation in recorder.conversations()]


def calls_a_tool_first(request: Request, choice: int) -> str:
    return "a is 1" if request["messages"][-1]["role"] == "tool" else CALL


async def record(stub: StubServer, way: str) -> tuple[list[TokenSequence], list[dict[str, Any]]]:
    async with recording(stub) as (recorder, policy, _):
        if way == "chat":
            await use_tool_by_chat(policy)
        elif way == "transport":
            await use_tool_by_client(policy.client, policy.model)
        else:
            async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
                await use_tool_by_client(client, policy.model)
        return sequences(recorder), recorder.transcript(recorder.conversations())


async def test_a_tool_call_is_recorded_alike_through_every_way(stub: StubServer) -> None:
    stub.reply = calls_a_tool_first
    by_chat = await record(stub, "chat")
    assert by_chat == await record(stub, "transport") == await record(stub, "gateway")
    [sequence], transcript = by_chat
    assert [message["role"] for message in transcript] == ["user", "assistant", "tool", "assistant"]
    assert transcript[1]["tool_calls"][0]["function"]["name"] == "look_up"
    sampled = [token for token, mask in zip(sequence.token_ids, sequence.mask, strict=True) if mask]
    assert sampled == [*CALL.encode(), END, *b"a is 1", END]
    assert [request["seed"] for request in stub.requests[:2]] == [request["seed"] for request in stub.requests[2:4]]


async def test_recorded_tokens_are_those_the_server_counted(stub: StubServer) -> None:
    counted = []
    stub.spoil = lambda response: counted.append(response["usage"])
    async with recording(stub) as (recorder, policy, _):
        await use_tool_by_chat(policy)
        calls = [recorded.call for recorded in recorder.calls()]
    assert [len(call.prompt_ids) for call in calls] == [usage["prompt_tokens"] for usage in counted]
    assert [call.completion_tokens for call in calls] == [usage["completion_tokens"] for usage in counted]


async def test_a_template_that_drops_history_forks(stub: StubServer) -> None:
    stub.render = render_last_turn
    stub.reply = lambda request, choice: f"answer {len(request['messages'])}"
    async with recording(stub) as (recorder, policy, _):
        messages = [*HELLO]
        messages += [await policy.chat(messages), {"role": "user", "content": "and now?"}]
        await policy.chat(messages)
        first, second = sequences(recorder)
        transcript = recorder.transcript(recorder.conversations())
    assert first.token_ids == [*render(HELLO), *b"answer 1", END]
    assert second.token_ids == [*render(messages[-1:]), *b"answer 3", END]
    assert sum(second.mask) == len(b"answer 3") + 1
    assert [m["content"] for m in transcript] == ["hello", "answer 1", "hello", "answer 1", "and now?", "answer 3"]


async def test_parallel_calls_are_ordered_by_their_beginning(stub: StubServer) -> None:
    stub.delay = 0.05
    async with recording(stub) as (recorder, policy, _):
        asks = (policy.chat([{"role": "user", "content": f"{i}"}]) for i in range(8))
        await asyncio.gather(*asks)
        assert [recorded.messages[0]["content"] for recorded in recorder.calls()] == [str(i) for i in range(8)]
        assert len(sequences(recorder)) == 8


async def test_the_run_decides_how_is_sampled(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    bent = {
        "model": "gpt-17",
        "temperature": 1.5,
        "max_tokens": 4096,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "logit_bias": {"5": 100},
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.2,
        "response_format": {"type": "json_object"},
        "guided_regex": "a+",
        "structured_outputs": {"choice": ["a"]},
        "min_tokens": 4,
        "bad_words": ["b"],
        "never_heard_of": True,
    }
    notices = Notices()
    async with recording(stub, notices=notices) as (recorder, _, _):
        for _ in range(3):
            await recorder.complete({"messages": HELLO, **bent})
    [sent, *_] = stub.requests
    assert sent["model"] == MODEL
    assert sent["temperature"] == SAMPLING.temperature
    assert sent["max_tokens"] == SAMPLING.max_tokens
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1}
    assert sent | neutral == sent
    assert not sent.keys() & {"logit_bias", "response_format", "guided_regex", "structured_outputs", "bad_words"}
    assert notices.counts == dict.fromkeys(bent, 3)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == len(bent)
    assert "warning: an agent asked for temperature 1.5; the run's is 0.7, and stays (shown once)" in warnings


async def test_harmless_parameters_pass_without_a_warning(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    harmless = {
        "model": MODEL,
        "temperature": SAMPLING.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "logit_bias": None,
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "seed": 5,
        "user": "me",
        "max_completion_tokens": 7,
    }
    passed = {"tools": [], "tool_choice": "auto", "n": 2, "stop": ["x"]}
    async with recording(stub) as (recorder, _, _):
        await recorder.complete({"messages": HELLO, **harmless, **passed})
    [sent] = stub.requests
    assert sent | passed == sent
    assert (sent["max_tokens"], sent["logprobs"], sent["return_token_ids"]) == (7, True, True)
    assert sent["seed"] != 5
    assert capsys.readouterr().err == ""


async def test_seeds_follow_from_the_attempt_and_the_call(stub: StubServer) -> None:
    for seed in ("one", "one", "two"):
        async with recording(stub, seed=seed) as (_, policy, _):
            await policy.chat(HELLO)
            await policy.chat(HELLO)
    seeds = [request["seed"] for request in stub.requests]
    assert seeds[0:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**62 for seed in seeds)


async def test_an_agent_gets_what_it_asked_for_and_no_more(stub: StubServer) -> None:
    async with recording(stub) as (recorder, _, _):
        plain = await recorder.complete({"messages": HELLO})
        full = await recorder.complete({"messages": HELLO, "logprobs": True, "return_token_ids": True})
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0].keys() == full["choices"][0].keys() - {"token_ids"}
    assert plain["choices"][0]["logprobs"] is None
    assert len(full["choices"][0]["logprobs"]["content"]) == len(full["choices"][0]["token_ids"])
    assert full["prompt_token_ids"] == render(HELLO)


async def test_the_client_streams(stub: StubServer) -> None:
    stub.reply = lambda request, choice: "streamed"
    async with recording(stub) as (recorder, policy, _):
        stream = await policy.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)  # type: ignore[call-overload]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "streamed"
        assert sum(sequences(recorder)[0].mask) == len("streamed") + 1
    assert "stream" not in stub.requests[0]


async def test_a_refused_request_is_the_agents_business(stub: StubServer) -> None:
    stub.fault = lambda number: 400 if number < 2 else None
    async with recording(stub) as (recorder, policy, _):
        with pytest.raises(BadRequestError, match="stub says 400"):
            await policy.client.chat.completions.create(model=MODEL, messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(RequestRefused, match="stub says 400"):
            await policy.chat(HELLO)
        await policy.chat(HELLO)
        assert recorder.fault is None
        assert len(recorder.calls()) == 1


def without_logprobs(response: dict[str, Any]) -> None:
    response["choices"][0]["logprobs"] = None


def with_nan(response: dict[str, Any]) -> None:
    response["choices"][0]["logprobs"]["content"][0]["logprob"] = math.nan


def miscounted(response: dict[str, Any]) -> None:
    response["usage"]["completion_tokens"] += 1


@pytest.mark.parametrize("spoil", [without_logprobs, with_nan, miscounted])
async def test_inexact_tokens_spoil_the_attempt_for_good(stub: StubServer, spoil: Any) -> None:
    stub.spoil = spoil
    async with recording(stub) as (recorder, policy, _):
        for _ in range(2):
            with pytest.raises(InexactTokens):
                await policy.chat(HELLO)
        assert isinstance(recorder.fault, InexactTokens)
    assert len(stub.requests) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 429, 404, 401, 0])
async def test_server_faults_are_tried_again(stub: StubServer, status: int) -> None:
    stub.fault = lambda number: status if number == 0 else None
    async with recording(stub) as (recorder, policy, _):
        await policy.chat(HELLO)
        assert recorder.fault is None
    assert len(stub.requests) == 2
    assert stub.requests[0] == stub.requests[1]


async def test_an_aborted_answer_is_a_server_fault(stub: StubServer) -> None:
    stub.spoil = lambda response: response["choices"][0].update(finish_reason="abort")
    async with recording(stub) as (recorder, policy, _):
        with pytest.raises(ServerFault, match="aborted"):
            await policy.chat(HELLO)
        assert recorder.fault


async def test_a_server_that_is_gone_or_late_is_given_up(stub: StubServer) -> None:
    limits = QUICK.model_copy(update={"request_timeout": 0.1})
    stub.delay = 0.5
    async with recording(stub, limits=limits) as (recorder, policy, _):
        with pytest.raises(ServerFault, match="no answer in time"):
            await policy.chat(HELLO)
    assert len(stub.requests) == 2
    stub.port = 1
    async with recording(stub) as (recorder, policy, _):
        with pytest.raises(ServerFault, match="can't be reached"):
            await policy.chat(HELLO)
        assert isinstance(recorder.fault, ServerFault)


async def test_after_the_end_nothing_is_recorded(stub: StubServer) -> None:
    stub.delay = 0.2
    async with recording(stub) as (recorder, policy, _):
        late = asyncio.create_task(policy.chat(HELLO))
        await asyncio.sleep(0.05)
        recorder.close()
        for call in (late, policy.chat(HELLO)):
            with pytest.raises(RequestRefused, match="over"):
                await call
        assert recorder.calls() == []
    assert len(stub.requests) == 1


async def test_no_more_requests_are_under_way_than_allowed(stub: StubServer) -> None:
    limits = QUICK.model_copy(update={"concurrency": 2})
    stub.delay = 0.05
    async with recording(stub, limits=limits) as (_, policy, _):
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(policy.chat(HELLO) for _ in range(8)))
        assert asyncio.get_running_loop().time() - start >= 4 * 0.05


def test_a_missing_address_is_named() -> None:
    with pytest.raises(InvalidInputs, match="NIGHTSCHOOL_POLICY_KEY, NIGHTSCHOOL_POLICY_MODEL not set"):
        Endpoint.from_environment({"NIGHTSCHOOL_POLICY_URL": "http://127.0.0.1:1/v1"})


async def test_a_policy_makes_its_client_once(stub: StubServer) -> None:
    async with recording(stub) as (_, policy, _):
        assert isinstance(policy, Policy)
        assert policy.client is policy.client
