"""Exact tokens from a real vLLM: what the stub server imitates."""

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agents import TOOLS
from openai import AsyncOpenAI, BadRequestError
from rollout_fixtures import recording

from environments import Policy
from environments.base import RequestRefused
from steps.agent import upstream
from steps.agent.limits import RolloutLimits
from steps.agent.recorder import Recorder
from steps.common.settings import SamplingSettings

if TYPE_CHECKING:
    from steps.serving.endpoint import Endpoint

pytestmark = [pytest.mark.serve, pytest.mark.slow]
HELLO: Any = [{"role": "user", "content": "hello"}]
LIMITS = RolloutLimits(request_timeout=60)
SAMPLING = SamplingSettings(temperature=0.7, max_tokens=12)


@pytest.fixture
def at(vllm_server: "Endpoint") -> Any:
    """Opens a recorder at the server."""
    where = upstream.Endpoint(vllm_server.base_url, vllm_server.api_key, vllm_server.model)

    def open_(seed: str = "seed", **changes: Any) -> Any:
        return recording(where, seed, LIMITS, SAMPLING.model_copy(update=changes))

    return open_


def tokens(recorder: Recorder) -> list[tuple[list[int], list[bool], list[float]]]:
    ends = recorder.conversations()
    return [(e.sequence.token_ids, e.sequence.mask, e.sequence.logprobs) for e in ends]


async def three_turns(ask: Any) -> None:
    """Asks, is made to call a tool, and goes on."""
    messages = [{"role": "user", "content": "What is a?"}]
    messages.append(await ask(messages=messages))
    messages.append({"role": "user", "content": "Look it up."})
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    messages.append({"role": "assistant", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": "1", "content": "a is 1"})
    messages.append(await ask(messages=messages, tools=TOOLS))
    messages.append({"role": "user", "content": "Sure?"})
    await ask(messages=messages, tools=TOOLS)


async def by_chat(policy: Policy) -> None:
    async def ask(messages: Any, **more: Any) -> Any:
        return {"role": "assistant", "content": (await policy.chat(messages, **more))["content"]}

    await three_turns(ask)


async def by_client(client: AsyncOpenAI, model: str) -> None:
    async def ask(**request: Any) -> Any:
        response = await client.chat.completions.create(model=model, **request)
        return {"role": "assistant", "content": response.choices[0].message.content}

    await three_turns(ask)


async def test_every_way_records_the_same(at: Any) -> None:
    recorded = []
    async with at() as (recorder, policy, _):
        await by_chat(policy)
        recorded.append(tokens(recorder))
    async with at() as (recorder, policy, _):
        await by_client(policy.client, policy.model)
        recorded.append(tokens(recorder))
    async with at() as (recorder, policy, _):
        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            await by_client(client, policy.model)
        recorded.append(tokens(recorder))
    ids = [[(token_ids, mask) for token_ids, mask, _ in sequences] for sequences in recorded]
    assert ids[0] == ids[1] == ids[2]
    for sequences in recorded[1:]:
        for one, other in zip(recorded[0], sequences, strict=True):
            assert one[2] == pytest.approx(other[2], abs=1e-5)


async def test_recorded_tokens_are_vllms_own_count(at: Any) -> None:
    usage = []
    async with at() as (recorder, _, _):
        for request in ({"n": 3}, {"tools": TOOLS}, {"stop": ["a", "e"]}, {"max_tokens": 1}):
            response = await recorder.complete({"messages": HELLO, **request})
            usage.append((response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]))
        calls = [recorded.call for recorded in recorder.calls()]
        assert [(len(call.prompt_ids), call.completion_tokens) for call in calls] == usage
        assert sum(sum(mask) for _, mask, _ in tokens(recorder)) == sum(sampled for _, sampled in usage)


async def test_the_recorded_tokens_are_what_the_template_gives(at: Any, vllm_server: "Endpoint") -> None:
    async with at() as (recorder, policy, _):
        await policy.chat(HELLO)
        [recorded] = recorder.calls()
    url = vllm_server.base_url.removesuffix("/v1") + "/tokenize"
    headers = {"Authorization": f"Bearer {vllm_server.api_key}"}
    body = {"model": vllm_server.model, "messages": HELLO}
    async with httpx.AsyncClient() as client:
        answer = (await client.post(url, json=body, headers=headers)).json()
    assert recorded.call.prompt_ids == answer["tokens"]


async def test_streaming_and_choices_through_the_gateway(at: Any) -> None:
    async with at() as (recorder, policy, _):
        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            stream = await client.chat.completions.create(model="any", messages=HELLO, n=2, stream=True)
            texts = {0: "", 1: ""}
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        [recorded] = recorder.calls()
    assert [reply["content"] or "" for reply in recorded.replies] == [texts[0], texts[1]]


async def test_a_forced_tool_call_comes_back(at: Any, capsys: pytest.CaptureFixture[str]) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    async with at(max_tokens=300) as (recorder, policy, _):
        message = await policy.chat(HELLO, tools=TOOLS, tool_choice=choice)
        assert message["tool_calls"][0]["function"]["name"] == "look_up"
        assert recorder.conversations()[0].sequence.mask[-1]
    assert "under a grammar" in capsys.readouterr().err


async def test_what_the_server_refuses_goes_to_the_agent(at: Any) -> None:
    long: Any = [{"role": "user", "content": "a" * 5000}]
    async with at() as (recorder, policy, _):
        with pytest.raises(RequestRefused, match="1024"):
            await policy.chat(long)
        with pytest.raises(BadRequestError):
            await policy.client.chat.completions.create(model="any", messages=long)
        assert recorder.fault is None
        await policy.chat(HELLO)


async def test_equal_seeds_sample_equally_in_company(at: Any) -> None:
    async def attempt(seed: str) -> list[tuple[list[int], list[bool]]]:
        async with at(seed=seed) as (recorder, policy, _):
            await policy.chat(HELLO)
            return [(ids, mask) for ids, mask, _ in tokens(recorder)]

    alone = await attempt("0")
    crowd = await asyncio.gather(*(attempt(str(i)) for i in range(12)))
    assert crowd[0] == alone
    assert len({tuple(ids) for [(ids, _)] in crowd}) > 6
