"""The recorder as an OpenAI-compatible server, for agents in any language and any framework.

Each rollout has its own base URL, whose middle nobody can guess:

    http://127.0.0.1:PORT/rollouts/<id>/v1      POST chat/completions (tools, n, streaming), GET models
                                                POST reward: {"reward": 1.0, "metrics": {…}, "metadata": {…}}, once

It listens on this machine only. A rollout that is over has no URL any more.
"""

import json
import math
import resource
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from aiohttp import web
from pydantic import ValidationError

from environments._client import no_such_endpoint, stream_events
from environments.base import Complete, Policy, RequestRefused, Result
from steps.agent.sequences import InexactTokens
from steps.common.errors import InvalidInputs, ServerFault

LARGEST_BODY = 256 << 20
BACKLOG = 4096


class Gateway:
    """Use it as an async context manager; it takes a free port."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._policies: dict[str, Policy] = {}
        self._port = 0
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=[_tell_refusals])
        application.router.add_post("/rollouts/{rollout}/v1/chat/completions", self._chat)
        application.router.add_post("/rollouts/{rollout}/v1/reward", self._reward)
        application.router.add_get("/rollouts/{rollout}/v1/models", self._models)
        application.router.add_route("*", "/{path:.*}", _unknown)
        # A client that hangs up stops its request, and with it the server's work.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        _allow_many_sockets()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @contextmanager
    def open(self, complete: Complete) -> Iterator[Policy]:
        """Gives `complete` an address for as long as the context lasts, and returns the policy that has it."""
        rollout, key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        base_url = f"http://127.0.0.1:{self._port}/rollouts/{rollout}/v1"
        policy = self._policies[rollout] = Policy(complete, base_url=base_url, api_key=key, model=self._model)
        try:
            yield policy
        finally:
            del self._policies[rollout]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        policy = self._policy(request)
        if policy.posted:
            raise RequestRefused(404, "this rollout is over: its reward was posted")
        try:
            body = _parse(await request.read())
            response = await policy.complete(body)
        except (ServerFault, InvalidInputs, InexactTokens) as fault:
            # The recorder remembers it: the attempt is lost whatever the agent does now.
            return web.json_response(_error(str(fault), "server_error"), status=503)
        if not body.get("stream"):
            return web.json_response(response)
        text = "".join(f"data: {event}\n\n" for event in stream_events(response, body))
        return web.Response(text=text, content_type="text/event-stream")

    async def _reward(self, request: web.Request) -> web.Response:
        policy = self._policy(request)
        result = _result(await request.read())
        if policy.posted:
            raise RequestRefused(409, "this rollout has its reward already")
        policy.posted = result
        return web.json_response({"reward": result.reward})

    async def _models(self, request: web.Request) -> web.Response:
        self._policy(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "nightschool"}
        return web.json_response({"object": "list", "data": [model]})

    def _policy(self, request: web.Request) -> Policy:
        policy = self._policies.get(request.match_info["rollout"])
        if policy is None:
            raise RequestRefused(404, "there is no such rollout, or it is over")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), policy.api_key.encode()):
            raise RequestRefused(401, "the API key is not this rollout's")
        return policy


@web.middleware
async def _tell_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as refusal:
        return web.json_response(refusal.body, status=refusal.status)


async def _unknown(request: web.Request) -> web.Response:
    raise no_such_endpoint(request.method, request.path)


def _result(content: bytes) -> Result:
    try:
        result = Result.model_validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RequestRefused(400, f'{where}: {first["msg"]}; post {{"reward": 1.0}}') from None
    if not math.isfinite(result.reward):
        raise RequestRefused(400, f"the reward must be a finite number, not {result.reward}")
    return result


def _parse(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise RequestRefused(400, f"the request is not JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RequestRefused(400, "the request must be an object with a list of `messages`")
    return body


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _allow_many_sockets() -> None:
    """Each rollout may hold two: one from its agent, one to the server."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
