"""The line to a server that is not ours: any with OpenAI's API.

It may be busy, and says for how long (Retry-After); it may not know the key or the model, and then nothing can be
played; it may refuse a parameter that every request has here, and then gets requests without it from then on.
"""

import asyncio
import random
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from environments.base import RequestRefused
from steps.agent.limits import RolloutLimits
from steps.agent.sampling import Notices
from steps.agent.upstream import Endpoint, Upstream
from steps.common.errors import InvalidInputs, ServerFault

NO_KEY = "none"
"""What is sent where there is none: clients and servers want some."""
BUSY = frozenset({429, 503})
IN_VAIN = frozenset({401, 402, 403, 404})
"""The key, the account or the model's name: no request would fare better."""
LONGEST_BUSY = 120.0
"""Seconds; a server that wants to be left alone for longer is given up."""
ELSE = {"max_tokens": "max_completion_tokens", "temperature": None, "seed": None}
"""What some models refuse of what is always sent, and what takes its place. The model's own choice is used then."""


class Busy(Exception):
    """The server is to be asked again after so many seconds."""

    def __init__(self, seconds: float, message: str) -> None:
        super().__init__(message)
        self.seconds = seconds


class ForeignUpstream(Upstream):
    """The session with such a server."""

    by_proxy = True

    def __init__(self, endpoint: Endpoint, limits: RolloutLimits, notices: Notices) -> None:
        super().__init__(endpoint, limits)
        self._notices = notices
        self._refused: set[str] = set()
        self._open_at = 0.0
        """When the server may be asked again, by the monotonic clock."""

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `Upstream.complete`. Raises `InvalidInputs` where the server refuses the key or the model."""
        end = time.monotonic() + self._limits.request_timeout
        while True:
            await self._turn()
            body = self._adapted(request)
            try:
                return await super().complete(body)
            except Busy as busy:
                self._leave_alone(busy, end)
            except RequestRefused as refusal:
                if not self._learned(refusal, body):
                    raise

    async def _turn(self) -> None:
        if (wait := self._open_at - time.monotonic()) > 0:
            await asyncio.sleep(wait * random.uniform(1, 1.5))  # not all at once

    def _leave_alone(self, busy: Busy, end: float) -> None:
        """Lets all requests wait. Raises `ServerFault` where this one would wait too long."""
        self._notices.warn("busy", f"the server is busy ({busy}): requests wait as long as it says")
        opens = time.monotonic() + busy.seconds
        if busy.seconds > LONGEST_BUSY or opens > end:
            raise ServerFault(f"the model's server is busy and asks for {busy.seconds:.0f} s of patience: {busy}")
        self._open_at = max(self._open_at, opens)

    def _adapted(self, request: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in request.items() if key not in self._refused}
        return kept | {other: request[key] for key in self._refused if (other := ELSE[key])}

    def _learned(self, refusal: RequestRefused, body: dict[str, Any]) -> bool:
        """Whether the refusal is about a parameter that can be left out from now on."""
        named = {key for key in ELSE.keys() & body.keys() if re.search(rf"\b{key}\b", str(refusal))}
        for key in sorted(named - self._refused):
            instead = f"{ELSE[key]} is sent instead" if ELSE[key] else "the model's own is used"
            self._notices.warn(f"refused_{key}", f"the server refuses {key}, so {instead}: {refusal}")
        self._refused |= named
        return bool(named)

    def _trouble(self, status: int, headers: Mapping[str, str], message: str) -> Exception:
        if self._key != NO_KEY:  # there are servers that repeat it
            message = message.replace(self._key, "…")
        if status in BUSY and (seconds := seconds_in(headers.get("Retry-After", ""))) is not None:
            self.healthy = False
            return Busy(seconds, f"HTTP {status}: {message}")
        if status in IN_VAIN:
            return InvalidInputs(f"{self._url} refuses the key or the model {self.model}: HTTP {status}: {message}")
        return super()._trouble(status, headers, message)


def seconds_in(retry_after: str) -> float | None:
    """What a Retry-After header says, in seconds from now; None where it says nothing that can be understood."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass  # a date, or nonsense
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def line_to(endpoint: Endpoint, limits: RolloutLimits, notices: Notices) -> Upstream:
    """The session with a server, by its kind."""
    return Upstream(endpoint, limits) if endpoint.exact else ForeignUpstream(endpoint, limits, notices)
