"""The recorder as an OpenAI-compatible server, for agents in any language and any framework.

Each rollout has its own base URL, whose middle nobody can guess:

    http://127.0.0.1:PORT/rollouts/<id>/v1      POST chat/completions (tools, n, streaming), GET models

It listens on this machine only. A rollout that is over has no URL any more.
"""

import json
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from environments._client import stream_events
from environments.base import Complete, RequestRefused
from steps.agent.sequences import InexactTokens
from steps.common.errors import ServerFault

LARGEST_BODY = 256 << 20
BACKLOG = 4096


@dataclass(frozen=True)
class Address:
    """How an agent reaches its rollout."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class _Route:
    complete: Complete
    api_key: str


class Gateway:
    """Use it as an async context manager; it takes a free port."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._routes: dict[str, _Route] = {}
        self._port = 0
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_post("/rollouts/{rollout}/v1/chat/completions", self._chat)
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
    def open(self, complete: Complete) -> Iterator[Address]:
        """Gives `complete` an address for as long as the context lasts."""
        rollout, key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self._routes[rollout] = _Route(complete, key)
        try:
            yield Address(f"http://127.0.0.1:{self._port}/rollouts/{rollout}/v1", key)
        finally:
            del self._routes[rollout]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            route = self._route(request)
            body = _parse(await request.read())
            response = await route.complete(body)
        except RequestRefused as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        except (ServerFault, InexactTokens) as fault:
            # The recorder remembers it: the attempt is lost whatever the agent does now.
            return web.json_response(_error(str(fault), "server_error"), status=503)
        if not body.get("stream"):
            return web.json_response(response)
        text = "".join(f"data: {event}\n\n" for event in stream_events(response, body))
        return web.Response(text=text, content_type="text/event-stream")

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._route(request)
        except RequestRefused as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "nightschool"}
        return web.json_response({"object": "list", "data": [model]})

    def _route(self, request: web.Request) -> _Route:
        route = self._routes.get(request.match_info["rollout"])
        if route is None:
            raise RequestRefused(404, "there is no such rollout, or it is over")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), route.api_key.encode()):
            raise RequestRefused(401, "the API key is not this rollout's")
        return route


async def _unknown(request: web.Request) -> web.Response:
    message = f"no {request.method} {request.path} here: there are POST …/v1/chat/completions and GET …/v1/models"
    return web.json_response(_error(message, "not_found"), status=404)


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
