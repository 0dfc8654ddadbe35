"""The vocabulary of an agent's world: tasks, the policy that attempts them, what happened, and what it was worth.

An environment is one file with one class:

    class Riddles(Environment):
        difficulty: int = 1                                   # its fields are its options

        def tasks(self, split): ...                           # what there is to attempt
        async def rollout(self, task, policy): ...            # one attempt, from start to reward

`rollout` may use `policy.chat(messages)`, the OpenAI client `policy.client`, or hand `policy.base_url`,
`policy.api_key` and `policy.model` to any agent in any language. Whatever it asks the
model is recorded with exact tokens.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Split = Literal["train", "test"]
Message = dict[str, Any]
"""A chat message as OpenAI's API has it."""
Complete = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""One chat completion: the request's JSON in, the response's JSON out."""


class UnknownEnvironment(Exception):
    """No such environment, or not with these options or tasks. The message says what was tried and what exists."""


class RequestRefused(Exception):
    """The model's server refused a request: too long a prompt, a malformed tool, …"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}
        }
        """As OpenAI's API reports errors."""


class Task(BaseModel):
    """One thing to attempt. All attempts of a group get the same task, `seed` included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Unique within the environment."""
    seed: int = 0
    """For whatever chance the environment has: equal seeds, equal luck."""
    data: dict[str, Any] = {}
    """Anything JSON holds."""


class Result(BaseModel):
    """What one attempt was worth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: float
    """Must be finite: a rollout whose reward is not is recorded as failed."""
    metrics: dict[str, float] = {}
    """Averaged in evaluations and reports."""
    metadata: dict[str, Any] = {}
    """Kept with the trajectory, JSON."""


@dataclass(frozen=True)
class TokenSequence:
    """One growing conversation as the model saw it. The three lists have equal length."""

    token_ids: list[int]
    mask: list[bool]
    """True where the policy sampled the token: only those are trained."""
    logprobs: list[float]
    """The sampler's log-probability (nats, at the sampling temperature) where `mask` is True, else 0."""


@dataclass(frozen=True)
class Failure:
    """Why a rollout has no reward."""

    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Trajectory:
    """What happened in one attempt."""

    task_id: str
    attempt: int
    """0 … group_size-1."""
    messages: list[Message]
    """The transcript, for people: the recorded conversations one after the other."""
    sequences: list[TokenSequence]
    """More than one where a prompt did not extend what came before: they share the trajectory's advantage."""
    reward: float | None
    """None where it failed."""
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    turns: int = 0
    """Model calls."""
    prompt_tokens: int = 0
    """Sum over the calls, as the server counts them."""
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TrajectoryGroup:
    """Several attempts at one task."""

    task: Task
    trajectories: list[Trajectory]


class Policy:
    """The model as an agent sees it."""

    def __init__(self, complete: Complete, *, base_url: str, api_key: str, model: str) -> None:
        self.base_url, self.api_key, self.model = base_url, api_key, model
        self.complete = complete
        """What all ways to ask the model come down to."""
        self.posted: Result | None = None
        """What the agent has posted to `{base_url}/reward`, where it is one that does."""

    async def chat(self, messages: Sequence[Message], **parameters: Any) -> Message:
        """Asks for the next assistant message. Lighter than `client` by some milliseconds of processor time a call.

        `parameters` are those of OpenAI's chat completions (`tools`, `max_tokens`, …).
        """
        response = await self.complete({"model": self.model, "messages": list(messages), **parameters})
        message: Message = response["choices"][0]["message"]
        return message

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """An OpenAI client whose calls are recorded without leaving this process."""
        from environments._client import openai_client

        return openai_client(self.complete, self.base_url, self.api_key)

    async def close(self) -> None:
        """Closes the client, where one was made."""
        if "client" in self.__dict__:
            await self.client.close()


Act = Callable[[Sequence[Message], Random], str]
"""A scripted policy: the conversation so far and a source of chance in, the assistant's text out.

It calls a tool in its text: `<tool_call>{"name": "find", "arguments": {"item": "nails"}}</tool_call>`.
"""


@dataclass(frozen=True)
class Player:
    """A scripted policy with a known worth, which pins the reward in tests."""

    name: Literal["best", "random", "worst"]
    act: Act
    reward: tuple[float, float]
    """Its mean reward over the test split lies in this closed interval."""


class Environment(BaseModel):
    """What the agent lives in. Subclasses add their options as fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, always the same, with no task in both splits."""
        raise NotImplementedError

    async def rollout(self, task: Task, policy: Policy) -> Result:
        """One attempt. Whatever it raises is recorded, and the attempt is retried a bounded number of times."""
        raise NotImplementedError

    async def score(self, group: TrajectoryGroup) -> Sequence[float | None]:
        """Rewards of a whole group, in its order; None drops an attempt. The default keeps the attempts' own.

        Not asked where a run has a judge (`[group.judge]`).
        """
        return [trajectory.reward for trajectory in group.trajectories]

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Endless example conversations to warm-start a model that knows nothing."""
        raise NotImplementedError

    def demonstrated_tools(self) -> Sequence[dict[str, Any]]:
        """The tools that rollouts offer in requests, as OpenAI's API has them: examples show them to the model, too."""
        return ()

    def players(self) -> Sequence[Player]:
        """Scripted players that pin the reward: at least a best and a worst one."""
        return ()
