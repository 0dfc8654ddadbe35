"""An attempt's calls of the model, by whichever way they come: a bounded number, and none once it is over or lost."""

import asyncio
import os
from typing import Any

from environments.base import Complete, RequestRefused
from steps.agent.sequences import InexactTokens
from steps.common.errors import InvalidInputs, ServerFault

PAUSE = 0.1
"""Seconds before a refusal: an agent that asks again and again keeps the others from working no more than so often."""


class TooManyCalls(RequestRefused):
    """The attempt has asked the model as often as it may."""


Fault = ServerFault | InvalidInputs | InexactTokens | TooManyCalls


class Calls:
    """Passes calls on to `complete`, at most `most` of them."""

    def __init__(self, complete: Complete, most: int) -> None:
        self.fault: Fault | None = None
        """What makes the attempt worthless, whatever the agent makes of it."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once no call is answered any more."""
        self._complete, self._left, self._most = complete, most, most
        self._pid = os.getpid()

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises what `complete` does, and `TooManyCalls`; later calls of a lost attempt get the same."""
        if os.getpid() != self._pid:
            os._exit(0)  # An agent has forked, and its copy may not speak on our connections.
        if self.over.done():
            await asyncio.sleep(PAUSE)
            raise self.fault or RequestRefused(404, "this rollout is over")
        if not self._left:
            fault = TooManyCalls(403, f"a rollout may call the model {self._most} times: rollout.limits.calls")
            self._lose(fault)
            raise fault
        self._left -= 1
        try:
            return await self._complete(request)
        except (ServerFault, InvalidInputs, InexactTokens) as fault:
            self._lose(fault)
            raise

    def close(self) -> None:
        """From now on every call is refused: what comes after the reward is not part of the attempt."""
        if not self.over.done():
            self.over.set_result(None)

    def _lose(self, fault: Fault) -> None:
        self.fault = self.fault or fault
        self.close()
