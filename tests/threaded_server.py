"""A web server in a thread of its own, so that what a test starts in other processes can call it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

from aiohttp import web

SECONDS = 10
"""That starting and stopping may take."""


class ThreadedServer:
    """Serves `routes` on this machine while it is a context manager; a port of 0 is one that is free."""

    def __init__(self, *routes: web.RouteDef, port: int = 0) -> None:
        self.port = port
        self._routes = routes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    async def _start(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.add_routes(self._routes)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        unanswered = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)
