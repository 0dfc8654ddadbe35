"""An agent of LangGraph plays as well as our own, and its tokens are recorded like anybody's."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from environment_fixtures import in_turn, play
from langchain_core.tools import StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from mail_fixtures import REWARDS, SEARCHED, said, task_of
from rollout_fixtures import QUICK, SAMPLING, recording, stub, venue_at
from stub_server import END, Request, StubServer, render

from environments import Environment, Message, TokenSequence, UnknownEnvironment, load
from environments._mail_attempt import Question
from environments._tool_calls import as_text, tool_calls
from environments.email_search_langgraph import langchains, react_agent
from steps.agent import upstream
from steps.agent.limits import RolloutLimits
from steps.agent.play import Venue
from steps.agent.play import play as play_at
from steps.agent.recorder import Recorder

if TYPE_CHECKING:
    from steps.serving.endpoint import Endpoint

__all__ = ["stub"]
LIMITS = QUICK.model_copy(update={"rollout_timeout": 60})
LONG = SAMPLING.model_copy(update={"max_tokens": 1000})


def ours() -> Environment:
    return load("email_search_langgraph")


@pytest.mark.parametrize("case", REWARDS)
def test_an_attempt_is_worth_what_the_formula_says(case: str) -> None:
    kind, replies, reward = REWARDS[case]
    task, question = task_of(ours(), kind)
    left = replies(question)
    assert play(ours(), task, lambda messages: left.pop(0)).reward == pytest.approx(reward, abs=1e-9)
    assert not left, "it went on to the end"


def test_all_calls_of_a_turn_are_made() -> None:
    task, question = task_of(ours(), "plain")
    answered = play(ours(), task, in_turn([SEARCHED + said(question.answer, *question.message_ids)]))
    assert answered.reward == pytest.approx(1.49)
    assert answered.metrics | {"turns": 1, "correct": 1} == answered.metrics


@pytest.mark.parametrize("arguments", ["{", "3", "null", "[]", '"a"', '{"keywords": ["\\ud800"]}'])
async def test_arguments_that_are_no_object_are_bad_ones(stub: StubServer, arguments: str) -> None:
    call = json.dumps({"name": "search_inbox", "arguments": arguments})
    replies = iter([f"<tool_call>{call}</tool_call>", "yes"])
    stub.reply = lambda request, choice: next(replies)
    task, _ = task_of(ours(), "plain")
    async with at(stub) as venue:
        trajectory = await play_at(venue, task, attempt=0)
    assert trajectory.failure is None
    ending = "no_call" if "ud800" in arguments else "bad_arguments"
    assert trajectory.metadata["ending"] == ending
    assert trajectory.reward == pytest.approx({"no_call": -1.9, "bad_arguments": -1.7}[ending])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = task_of(ours(), "plain")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnknownEnvironment, match=r"needs langgraph, langchain_openai: install nightschool\[agents\]"):
        play(ours(), task, in_turn([""]))


@asynccontextmanager
async def at(stub: StubServer) -> AsyncIterator[Venue]:
    """A place with time and tokens enough: one of the stub's is a letter."""
    async with venue_at(stub, ours(), LIMITS) as venue:
        yield replace(venue, sampling=LONG)


def by_plan(question: Question) -> Callable[[Request, int], str]:
    """A server's model that looks for the mail, reads it and answers."""
    replies = [_as_stub(text) for text in REWARDS["right after a look"][1](question)]
    return lambda request, choice: replies[sum(message["role"] == "assistant" for message in request["messages"])]


async def test_recorded_tokens_are_the_servers(stub: StubServer) -> None:
    task, question = task_of(ours(), "plain")
    stub.reply = by_plan(question)
    counted: list[dict[str, int]] = []
    stub.spoil = lambda response: counted.append(response["usage"])
    async with at(stub) as venue:
        trajectory = await play_at(venue, task, attempt=0)
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.turns) == (pytest.approx(1.47), 3)
    assert trajectory.prompt_tokens == sum(usage["prompt_tokens"] for usage in counted)
    assert trajectory.completion_tokens == sum(usage["completion_tokens"] for usage in counted)
    [sequence] = trajectory.sequences
    last = stub.requests[-1]
    assert sequence.token_ids == [*render(last["messages"]), *stub.reply(last, 0).encode(), END]
    sampled = [token for token, own in zip(sequence.token_ids, sequence.mask, strict=True) if own]
    assert sampled == [token for request in stub.requests for token in (*stub.reply(request, 0).encode(), END)]
    assert all(p == (-((t % 7) + 1) / 8 if own else 0) for t, own, p in _rows(sequence))
    assert [message["role"] for message in trajectory.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant"),
    ]


async def test_what_it_sends_is_what_our_own_agent_sends(stub: StubServer) -> None:
    task, question = task_of(ours(), "plain")
    stub.reply = by_plan(question)
    recorded: list[tuple[list[list[int]], list[Message]]] = []
    for name in ("email_search", "email_search_langgraph"):
        async with recording(stub, limits=LIMITS, sampling=LONG) as (recorder, policy, _):
            result = await load(name).rollout(task, policy)
            assert result.reward == pytest.approx(1.47)
            recorded.append((sampled_by(recorder), recorder.calls()[0].messages))
    assert recorded[0] == recorded[1]
    ours_asked, theirs_asked = stub.requests[0], stub.requests[3]
    assert _names(ours_asked) == _names(theirs_asked) == ["search_inbox", "read_email", "return_final_answer"]
    assert ours_asked.keys() == theirs_asked.keys()


async def test_a_server_that_fails_is_asked_again_by_the_recorder(stub: StubServer) -> None:
    task, question = task_of(ours(), "plain")
    stub.reply = by_plan(question)
    stub.fault = lambda number: 500 if number == 1 else None
    async with at(stub) as venue:
        trajectory = await play_at(venue, task, attempt=0)
    assert (trajectory.reward, len(stub.requests)) == (pytest.approx(1.47), 4)


async def test_many_at_once_keep_apart(stub: StubServer) -> None:
    tasks = [task for task in ours().tasks("train") if len(task.data["message_ids"]) == 1][:12]
    plans = {task.data["question"]: by_plan(Question.model_validate(task.data)) for task in tasks}
    stub.reply = lambda request, choice: plans[request["messages"][1]["content"].split("\n")[-1]](request, choice)
    async with at(stub) as venue:
        trajectories = await asyncio.gather(*(play_at(venue, task, attempt=0) for task in tasks))
    assert [trajectory.reward for trajectory in trajectories] == [pytest.approx(1.47)] * len(tasks)


@pytest.mark.serve
@pytest.mark.slow
async def test_vllms_tokens_are_recorded_as_through_the_policy(vllm_server: "Endpoint") -> None:
    where = upstream.Endpoint(vllm_server.base_url, vllm_server.api_key, vllm_server.model)
    limits, hello = RolloutLimits(request_timeout=60), [{"role": "user", "content": "What is a?"}]
    tool = StructuredTool.from_function(coroutine=look_up)
    async with recording(where, "seed", limits) as (by_chat, policy, _):
        await policy.chat(hello, tools=[convert_to_openai_tool(tool)])
    async with recording(where, "seed", limits) as (by_graph, policy, _), langchains(policy) as model:
        await react_agent(model, [tool], last_tool="look_up").ainvoke({"messages": hello})
    assert sampled_by(by_graph)[0] == sampled_by(by_chat)[0]


async def look_up(key: str) -> str:
    """Looks up."""
    return f"{key} is 1"


def sampled_by(recorder: Recorder) -> list[list[int]]:
    return [conversation.sequence.token_ids for conversation in recorder.conversations()]


def _rows(sequence: TokenSequence) -> Sequence[tuple[int, bool, float]]:
    return list(zip(sequence.token_ids, sequence.mask, sequence.logprobs, strict=True))


def _names(request: Request) -> list[str]:
    return [tool["function"]["name"] for tool in request["tools"]]


def _as_stub(text: str) -> str:
    """The stub takes arguments as JSON in a string, as they are in what it answers."""
    [call] = tool_calls({"content": text})
    return as_text(call.name, json.dumps(call.arguments))  # type: ignore[arg-type]
