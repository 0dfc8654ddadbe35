"""The line to the policy's server.

A server fault (unreachable, broken, busy, too late) is retried here, a bounded number of times, and then ends the
attempt; a refused request is the agent's mistake and goes back to the agent at once.
"""

import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from environments.base import RequestRefused
from steps.agent.limits import RolloutLimits
from steps.common.errors import InvalidInputs, ServerFault

URL, KEY, MODEL = "NIGHTSCHOOL_POLICY_URL", "NIGHTSCHOOL_POLICY_KEY", "NIGHTSCHOOL_POLICY_MODEL"
# No agent chooses the key or the model: a wrong key (401, 403), an adapter that is not loaded (404) and a busy server
# (408, 429) are never its mistake.
SERVERS_FAULT = frozenset({401, 403, 404, 408, 429})
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
# vLLM's server closes idle connections after 5 s; one reused at that moment would be a needless fault.
KEEPALIVE = 4.0


@dataclass(frozen=True)
class Endpoint:
    """Where the policy is served, and as what."""

    url: str
    """Ends in `/v1`."""
    key: str
    model: str
    """The name under which the server knows this checkpoint."""
    exact: bool = True
    """Does it tell token ids? False for servers that only speak OpenAI's API."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads the three variables. Raises `InvalidInputs`, naming those that are missing."""
        if missing := [name for name in (URL, KEY, MODEL) if not environment.get(name)]:
            raise InvalidInputs(
                f"{', '.join(missing)} not set: a rollout needs the address (http://…/v1), the key and the model name "
                f"of the policy's server"
            )
        return cls(environment[URL].rstrip("/"), environment[KEY], environment[MODEL])


class Upstream:
    """One HTTP session with the server, shared by a shard's rollouts. Use it as an async context manager."""

    by_proxy = False
    """Does the machine's proxy lead to it?"""

    def __init__(self, endpoint: Endpoint, limits: RolloutLimits) -> None:
        self.model = endpoint.model
        self.requests = 0
        """Sent, retries included."""
        self.healthy = True
        """Whether the last request that came to an end was answered."""
        self._url = f"{endpoint.url}/chat/completions"
        self._key = endpoint.key
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
            timeout=aiohttp.ClientTimeout(limits.request_timeout, sock_connect=limits.connect_timeout),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
            trust_env=self.by_proxy,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a chat completion.

        Raises `RequestRefused` where the request can't be answered, `ServerFault` when all retries have failed.
        """
        body = json.dumps(request).encode()
        wait = FIRST_WAIT
        for attempts_left in range(self._limits.request_retries, -1, -1):
            try:
                return await self._post(body)
            except ServerFault:
                if not attempts_left:
                    raise
            await asyncio.sleep(wait * random.uniform(0.5, 1))
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("unreachable")

    async def _post(self, body: bytes) -> dict[str, Any]:
        async with self._slots:
            self.requests += 1
            try:
                response = await self._send(body)
            except ServerFault:
                self.healthy = False
                raise
            self.healthy = True
            return response

    async def _send(self, body: bytes) -> dict[str, Any]:
        assert self._session is not None
        try:
            async with self._session.post(self._url, data=body) as response:
                content = await response.read()
        except TimeoutError:
            raise ServerFault(f"the policy's server gave no answer in time ({self._url})") from None
        except aiohttp.ClientError as error:
            raise ServerFault(f"the policy's server can't be reached ({self._url}): {error}") from None
        if response.status != 200:
            raise self._trouble(response.status, response.headers, message_in(content))
        return _answer(content)

    def _trouble(self, status: int, headers: Mapping[str, str], message: str) -> Exception:
        """The error for an HTTP status that is not 200."""
        if 400 <= status < 500 and status not in SERVERS_FAULT:
            return RequestRefused(status, message)
        return ServerFault(f"the policy's server is out of order ({self._url}): HTTP {status}: {message}")


def _answer(content: bytes) -> dict[str, Any]:
    try:
        response: dict[str, Any] = json.loads(content)
    except ValueError:
        raise ServerFault(f"the policy's server answered with something that is no JSON: {content[:80]!r}") from None
    if not _is_completion(response):
        raise ServerFault(f"the policy's server answered with something that is no chat completion: {content[:80]!r}")
    if any(choice.get("finish_reason") == "abort" for choice in response["choices"]):
        raise ServerFault("the policy's server aborted the request")
    return response


def _is_completion(response: object) -> bool:
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and isinstance(choice.get("message"), dict) for choice in choices)


def message_in(content: bytes) -> str:
    """The server's own words."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
