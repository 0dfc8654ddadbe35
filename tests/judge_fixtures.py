"""A scripted judge: a server with OpenAI's API whose answers a test chooses, and attempts of known quality.

It knows what a transcript is worth by the word `quality=…` in it, and answers with that unless told otherwise. It keeps
every request it saw.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from aiohttp import web
from run_fixtures import store_rollouts, trajectory
from threaded_server import ThreadedServer

from environments import Task, Trajectory, TrajectoryGroup
from steps.common import layout, tables
from steps.common.artifacts import Groups
from steps.common.settings import EnvironmentSettings
from steps.group import GROUP, GroupInputs, GroupSettings
from steps.judge.settings import JudgeSettings

KEY_VARIABLE, KEY = "TEST_JUDGE_KEY", "judge-key"
PROMPT_TOKENS, COMPLETION_TOKENS = 100, 20
"""Of each answer, as the server counts them."""
INSTRUCTIONS = [{"role": "system", "content": "You sort books."}, {"role": "user", "content": "Sort this shelf."}]
Request = dict[str, Any]


def attempts_in(request: Request) -> dict[str, list[dict[str, Any]]]:
    """The attempts that a request shows."""
    attempts: dict[str, list[dict[str, Any]]] = json.loads(request["messages"][1]["content"])["attempts"]
    return attempts


def fair(request: Request) -> dict[str, Any]:
    """Each attempt's own quality, by its name."""

    def quality(messages: list[dict[str, Any]]) -> float:
        return max((float(q) for q in re.findall(r"quality=([\d.]+)", json.dumps(messages))), default=0.0)

    return {
        name: {"explanation": f"worth {quality(messages)}", "score": quality(messages)}
        for name, messages in attempts_in(request).items()
    }


class JudgeServer(ThreadedServer):
    """Use it as a context manager; `url` ends in `/v1`."""

    def __init__(self) -> None:
        super().__init__(web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._list))
        self.requests: list[Request] = []
        self.reply: Callable[[Request, int], str | web.StreamResponse] = lambda request, _: json.dumps(fair(request))
        """Given a request and the number of those before: the answer's content, or a whole response."""
        self.usage = True
        """Does it count tokens?"""
        self.finish_reason = "stop"
        self.models: list[dict[str, Any]] = []
        """What it lists."""
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != f"Bearer {KEY}":
            return fault(401, "wrong key")
        request, number = await http.json(), len(self.requests)
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        content = self.reply(request, number)
        return content if isinstance(content, web.StreamResponse) else self._answer(request, content)

    async def _list(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"object": "model", **model} for model in self.models]})

    def _answer(self, request: Request, content: str) -> web.StreamResponse:
        message = {"role": "assistant", "content": content}
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": COMPLETION_TOKENS,
            "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
        }
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": request["model"], "choices": [choice]}
        return web.json_response(answer | ({"usage": usage} if self.usage else {}))


def fault(status: int, message: str, **headers: str) -> web.StreamResponse:
    """An error as OpenAI's API tells it."""
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """A scripted judge, and its key in the environment."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with JudgeServer() as server:
        yield server


def attempt(task: str, number: int, quality: float | None, **more: Any) -> Trajectory:
    """An attempt whose transcript tells what it is worth; one of no quality has failed."""
    said = {"role": "assistant", "content": f"A shelf of quality={quality}, I hope."}
    made = trajectory(task, number, None if quality is None else 0.25, **more)
    made.messages[:] = [*INSTRUCTIONS, said]
    return made


def shelf(task: str, *qualities: float | None) -> TrajectoryGroup:
    """A group with an attempt a quality."""
    return TrajectoryGroup(Task(id=task), [attempt(task, i, quality) for i, quality in enumerate(qualities)])


def inputs_for(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> GroupInputs:
    rollouts = store_rollouts(root, groups)
    """An iteration of `groups`, judged by `server` one after the other unless told otherwise."""
    own = {"model": "wise", "base_url": server.url, "key_variable": KEY_VARIABLE, "concurrency": 1}
    rule = GroupSettings(
        min_attempts=settings.pop("min_attempts", None), judge=JudgeSettings.model_validate(own | settings)
    )
    return GroupInputs(
        iteration=0, rollouts=[rollouts], environment=EnvironmentSettings(name="tic_tac_toe"), settings=rule
    )


def run_group(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> Groups:
    """Scores and filters them."""
    return GROUP.run(inputs_for(root, server, groups, **settings), root, layout.groups(0))


def again(root: Path, server: JudgeServer, groups: list[TrajectoryGroup], **settings: Any) -> Groups:
    """The same once more, as after a rewind."""
    if (root / layout.groups(0)).exists():
        (root / layout.groups(0)).rename(root / f"aside-{len(list(root.iterdir()))}")
    return run_group(root, server, groups, **settings)


def table(root: Path) -> pl.DataFrame:
    """What became of each attempt."""
    return tables.read([root / layout.groups(0) / tables.GROUPS], tables.GROUP_COLUMNS)
