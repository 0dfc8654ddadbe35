"""The gateway is the recorder for agents that only know a base URL and a key."""

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest
from agents import TOOLS
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, InternalServerError, NotFoundError
from rollout_fixtures import recording, stub
from stub_server import END, MODEL, StubServer

from environments import Policy, Result
from steps.agent.recorder import Recorder

__all__ = ["stub"]
HELLO: Any = [{"role": "user", "content": "hello"}]


def client_of(policy: Policy, **changes: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**{"base_url": policy.base_url, "api_key": policy.api_key, "max_retries": 0} | changes)


def sampled(recorder: Recorder) -> list[bytes]:
    return [
        bytes(t for t, hit in zip(c.sequence.token_ids, c.sequence.mask, strict=True) if hit and t != END)
        for c in recorder.conversations()
    ]


async def test_choices_come_back_and_are_recorded(stub: StubServer) -> None:
    stub.reply = lambda request, choice: f"choice {choice}"
    async with recording(stub) as (recorder, policy, _), client_of(policy) as client:
        response = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
        assert [choice.message.content for choice in response.choices] == ["choice 0", "choice 1", "choice 2"]
        assert response.usage and response.usage.completion_tokens == 27
        assert sampled(recorder) == [b"choice 0", b"choice 1", b"choice 2"]


async def test_streams_like_openai(stub: StubServer) -> None:
    stub.reply = lambda request, choice: f"choice {choice}"
    async with recording(stub) as (recorder, policy, _), client_of(policy) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        assert sampled(recorder) == [b"choice 0", b"choice 1"]
    texts, finishes = ["", ""], ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        finishes[choice.index] += choice.finish_reason or ""
    assert (texts, finishes) == (["choice 0", "choice 1"], ["stop", "stop"])
    assert chunks[0].choices[0].logprobs
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 18


async def test_streams_tool_calls(stub: StubServer) -> None:
    stub.reply = lambda request, choice: '<tool_call>{"name": "look_up", "arguments": "{}"}</tool_call>'
    async with recording(stub) as (_, policy, _), client_of(policy) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, stream=True)  # type: ignore[call-overload]
        calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "look_up", "{}")]


async def test_lists_the_policy_as_its_model(stub: StubServer) -> None:
    async with recording(stub) as (_, policy, _), client_of(policy) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]


async def test_errors_look_like_openais(stub: StubServer) -> None:
    stub.fault = lambda number: 422 if number == 0 else 500
    async with recording(stub) as (recorder, policy, _), client_of(policy) as client:
        with pytest.raises(Exception, match="stub says 422"):
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert recorder.fault is None
        with pytest.raises(BadRequestError, match="list of `messages`"):
            await client.chat.completions.create(model=MODEL, messages="hello")  # type: ignore[arg-type]
        with pytest.raises(NotFoundError, match=r"no POST .*/embeddings here: use POST …/v1/chat/completions"):
            await client.embeddings.create(model=MODEL, input="hello")
        async with client_of(policy, api_key="guess") as stranger:
            with pytest.raises(AuthenticationError, match="not this rollout's"):
                await stranger.chat.completions.create(model=MODEL, messages=HELLO)
        with pytest.raises(InternalServerError, match="out of order"):
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert recorder.fault


async def test_a_body_that_is_not_json_is_refused(stub: StubServer) -> None:
    async with recording(stub) as (_, policy, _), aiohttp.ClientSession() as session:
        url, headers = f"{policy.base_url}/chat/completions", {"Authorization": f"Bearer {policy.api_key}"}
        async with session.post(url, data=b"{", headers=headers) as response:
            assert response.status == 400
            assert "not JSON" in json.loads(await response.read())["error"]["message"]


async def post(policy: Policy, path: str, body: bytes | Any, key: str = "") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or policy.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{policy.base_url}{path}", data=data, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_a_reward_is_posted_once_and_ends_the_rollout(stub: StubServer) -> None:
    async with recording(stub) as (_, policy, _):
        assert (await post(policy, "/reward", {"reward": 1}, key="guess"))[0] == 401
        assert policy.posted is None
        result = {"reward": 1, "metrics": {"turns": 2}, "metadata": {"answer": ["a"]}}
        assert await post(policy, "/reward", result) == (200, {"reward": 1.0})
        assert policy.posted == Result(reward=1.0, metrics={"turns": 2.0}, metadata={"answer": ["a"]})
        status, body = await post(policy, "/reward", {"reward": 0.5})
        assert (status, policy.posted.reward) == (409, 1.0)
        assert "has its reward already" in body["error"]["message"]
        async with client_of(policy) as client:
            with pytest.raises(NotFoundError, match="over: its reward was posted"):
                await client.chat.completions.create(model=MODEL, messages=HELLO)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body: Invalid JSON"),
        (b'{"reward": NaN}', "finite number, not nan"),
        ([1], "the body: "),
        ({}, "reward: Field required"),
        ({"reward": "1"}, "reward: Input should be a valid number"),
        ({"reward": None}, "reward: Input should be a valid number"),
        ({"reward": True}, "reward: Input should be a valid number"),
        ({"reward": 1, "score": 2}, "score: Extra inputs"),
        ({"reward": 1, "metrics": {"turns": "two"}}, "metrics.turns: Input should be a valid number"),
    ],
)
async def test_a_reward_that_is_none_is_refused(stub: StubServer, body: Any, message: str) -> None:
    async with recording(stub) as (_, policy, _):
        status, answer = await post(policy, "/reward", body)
        assert (status, policy.posted) == (400, None)
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/messages", "Anthropic's Messages API is not offered"),
        ("/responses", "Responses API is not offered.*OpenAIChatCompletionsModel"),
        ("/completions", "completions of plain text"),
        ("/embeddings", "there is no POST /rollouts/.*/v1/embeddings here"),
    ],
)
async def test_what_gives_no_exact_tokens_is_refused_as_both_makers_clients_know_it(
    stub: StubServer, path: str, message: str
) -> None:
    async with recording(stub) as (recorder, policy, _):
        status, answer = await post(policy, path, {"model": MODEL, "messages": HELLO, "max_tokens": 5})
        assert (status, answer["type"], recorder.calls()) == (404, "error", [])
        assert re.search(f"{message}.*: use POST …/v1/chat/completions", answer["error"]["message"])
        with pytest.raises(NotFoundError) as error:  # in this process
            await policy.client.post(path, body={}, cast_to=object)
        assert answer["error"]["message"] in str(error.value)
    assert stub.requests == []


async def test_a_rollout_that_is_over_has_no_address(stub: StubServer) -> None:
    async with recording(stub) as (recorder, policy, gateway):
        with gateway.open(recorder.complete) as other:
            assert other.base_url != policy.base_url
        async with client_of(policy, base_url=other.base_url, api_key=other.api_key) as client:
            with pytest.raises(NotFoundError, match="no such rollout, or it is over"):
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            with pytest.raises(NotFoundError, match="no such rollout"):
                await client.models.list()


async def test_each_rollout_is_recorded_by_itself(stub: StubServer) -> None:
    async with recording(stub) as (first, policy, gateway), recording(stub, seed="other") as (second, _, _):
        with gateway.open(second.complete) as address:
            elsewhere = {"base_url": address.base_url, "api_key": address.api_key}
            async with client_of(policy) as one, client_of(policy, **elsewhere) as two:
                await one.chat.completions.create(model=MODEL, messages=HELLO)
                await two.chat.completions.create(model=MODEL, messages=HELLO)
                await two.chat.completions.create(model=MODEL, messages=HELLO)
        assert (len(first.calls()), len(second.calls())) == (1, 2)


async def test_hanging_up_stops_the_request(stub: StubServer) -> None:
    stub.delay = 0.3
    async with recording(stub) as (recorder, policy, _), client_of(policy) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.chat.completions.create(model=MODEL, messages=HELLO), timeout=0.1)
        await asyncio.sleep(0.5)
        assert recorder.calls() == []


async def test_many_at_once(stub: StubServer) -> None:
    async with recording(stub) as (recorder, policy, _), aiohttp.ClientSession() as session:
        url, headers = f"{policy.base_url}/chat/completions", {"Authorization": f"Bearer {policy.api_key}"}

        async def ask() -> int:
            async with session.post(url, json={"messages": HELLO}, headers=headers) as response:
                return response.status

        assert set(await asyncio.gather(*(ask() for _ in range(300)))) == {200}
        assert len(recorder.calls()) == 300
