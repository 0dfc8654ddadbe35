"""The exact tokens of programs at a real vLLM: one of Node.js, and one with OpenAI's Agents SDK.

They are those that the policy's own client would have had recorded, vLLM counts as many, and gives them the same
log-probabilities when it is asked again.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agents import TOOLS
from node_fixtures import node_modules
from rollout_fixtures import recording

from environments import Message, Policy, Task, load
from steps.agent import upstream
from steps.agent.limits import RolloutLimits
from steps.agent.recorder import Recorder
from steps.common.settings import SamplingSettings

if TYPE_CHECKING:
    from steps.serving.endpoint import Endpoint

__all__ = ["node_modules"]
pytestmark = [pytest.mark.serve, pytest.mark.slow]
LIMITS = RolloutLimits(request_timeout=60)
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=12)
TURNS = ["What is a?", "Look it up.", "Sure?"]
IN_NODE = """
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const { data } = JSON.parse(await text(process.stdin));
const client = new OpenAI();
const messages = [];
const usage = [];
for (const [turn, content] of data.turns.entries()) {
  messages.push({ role: "user", content });
  const request = { model: process.env.OPENAI_MODEL, messages, tools: data.tools };
  let reply = "";
  if (turn == 1) {
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
      reply += chunk.choices[0]?.delta?.content ?? "";
    }
  } else {
    const response = await client.chat.completions.create(request);
    reply = response.choices[0].message.content;
    usage.push([turn, response.usage.prompt_tokens, response.usage.completion_tokens]);
  }
  messages.push({ role: "assistant", content: reply });
}
await client.post("/reward", { body: { reward: 1, metadata: { usage } } });
"""
WITH_THE_AGENTS_SDK = """
import asyncio, json, os, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def look_up(key: str) -> str:
    "Looks up."
    return key + " is 1"

async def main():
    turns = json.load(sys.stdin)["data"]["turns"]
    async with AsyncOpenAI() as client:
        model = OpenAIChatCompletionsModel(model=os.environ["OPENAI_MODEL"], openai_client=client)
        agent, history, usage = Agent(name="a", model=model, tools=[look_up]), [], []
        for turn in turns:
            run = await Runner.run(agent, [*history, {"role": "user", "content": turn}], max_turns=2)
            history = run.to_input_list()
            counts = [(r.usage.input_tokens, r.usage.output_tokens) for r in run.raw_responses]
            usage += [(len(usage) + i, *count) for i, count in enumerate(counts)]
        body = {"reward": 1, "metadata": {"usage": usage}}
        await client.post("/reward", body=body, cast_to=object)

asyncio.run(main())
"""


@pytest.fixture
def at(vllm_server: "Endpoint") -> Any:
    """Opens a recorder at the server."""
    where = upstream.Endpoint(vllm_server.base_url, vllm_server.api_key, vllm_server.model)
    return lambda: recording(where, "seed", LIMITS, SAMPLING)


async def by_program(command: list[str], policy: Policy, tmp_path: Path) -> list[list[int]]:
    """Has a program play; returns what it was told of the tokens: the call's number, prompt, sampled."""
    (tmp_path / "tasks.jsonl").write_text("")
    environment = load("program", command=command, file=tmp_path / "tasks.jsonl")
    result = await environment.rollout(Task(id="a", data={"turns": TURNS, "tools": TOOLS}), policy)
    usage: list[list[int]] = result.metadata["usage"]
    return usage


def counted(recorder: Recorder, usage: list[list[int]]) -> bool:
    calls = [recorded.call for recorded in recorder.calls()]
    return usage == [[number, len(calls[number].prompt_ids), calls[number].completion_tokens] for number, *_ in usage]


async def rescored(recorder: Recorder, server: "Endpoint") -> None:
    """Asks vLLM for the log-probabilities of what was recorded as its own."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {server.api_key}"}, timeout=60) as client:
        for sequence in (conversation.sequence for conversation in recorder.conversations()):
            body = {"model": server.model, "prompt": sequence.token_ids, "max_tokens": 1, "prompt_logprobs": 0}
            answer = (await client.post(f"{server.base_url}/completions", json=body)).raise_for_status().json()
            scores = answer["choices"][0]["prompt_logprobs"]
            sampled = [i for i, own in enumerate(sequence.mask) if own]
            again = [scores[i][str(sequence.token_ids[i])]["logprob"] for i in sampled]
            assert sampled and [sequence.logprobs[i] for i in sampled] == pytest.approx(again, abs=1e-4)


async def test_a_node_program_is_recorded_as_the_policys_own_client(
    at: Any, vllm_server: "Endpoint", node_modules: Path, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules)
    (tmp_path / "agent.mjs").write_text(IN_NODE)
    async with at() as (by_node, policy, _):
        usage = await by_program(["node", str(tmp_path / "agent.mjs")], policy, tmp_path)
        assert len(usage) == 2 and counted(by_node, usage)
        await rescored(by_node, vllm_server)
    async with at() as (by_chat, policy, _):
        messages: list[Message] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            reply = await policy.chat(messages, tools=TOOLS)
            messages.append({"role": "assistant", "content": reply["content"]})
    tokens = [[(c.sequence.token_ids, c.sequence.mask) for c in r.conversations()] for r in (by_node, by_chat)]
    assert tokens[0] == tokens[1]


async def test_the_agents_sdks_tokens_are_those_that_vllm_counts_and_scores(
    at: Any, vllm_server: "Endpoint", tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(WITH_THE_AGENTS_SDK)
    async with at() as (recorder, policy, _):
        usage = await by_program([sys.executable, str(tmp_path / "agent.py")], policy, tmp_path)
        assert len(usage) == len(TURNS) and counted(recorder, usage)
        await rescored(recorder, vllm_server)
