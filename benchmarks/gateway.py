"""2,000 concurrent requests through the gateway, and the same straight to the server behind it.

    .venv/bin/python benchmarks/gateway.py

The server is the tests' stub, so that the gateway is what is measured. Client, gateway and server are a process each;
every request has a rollout, and so a URL and a key, of its own. Fails if one request does.
"""

import asyncio
import json
import resource
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple

import aiohttp

from steps.agent.gateway import Gateway
from steps.agent.limits import RolloutLimits
from steps.agent.recorder import Recorder
from steps.agent.sampling import Notices
from steps.agent.upstream import Endpoint, Upstream
from steps.common.settings import SamplingSettings

REQUESTS, ROUNDS = 2000, 3
STUB = Path(__file__).parents[1] / "tests/stub_server.py"
MESSAGES = [{"role": "system", "content": "You play X."}, {"role": "user", "content": "X b1 c1\nO b2 c2\na3 b3 c3"}]


class Address(NamedTuple):
    """Where to ask, and with which key."""

    base_url: str
    api_key: str


async def serve_gateway(url: str) -> None:
    """Opens a rollout for every request, prints their addresses, and serves until standard input ends."""
    limits = RolloutLimits(concurrency=REQUESTS)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream(Endpoint(url, "stub-key", "policy"), limits))
        gateway = await stack.enter_async_context(Gateway("policy"))
        rollouts = stack.enter_context(ExitStack())
        recorders = [Recorder(upstream, SamplingSettings(), f"{i}", Notices()) for i in range(REQUESTS)]
        opened = [rollouts.enter_context(gateway.open(recorder.complete)) for recorder in recorders]
        idle = time.process_time()
        print(json.dumps([[address.base_url, address.api_key] for address in opened]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        recorded = sum(len(recorder.calls()) for recorder in recorders)
        print(json.dumps({"recorded": recorded, "cpu": time.process_time() - idle}), flush=True)


async def ask_all(addresses: list[Address]) -> tuple[float, int, list[float]]:
    """Seconds in all, failed requests, and each request's seconds."""
    errors, latencies = 0, []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(address: Address) -> None:
            nonlocal errors
            started = time.perf_counter()
            headers = {"Authorization": f"Bearer {address.api_key}"}
            body: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 16}
            try:
                async with session.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as answer:
                    errors += answer.status != 200 or not (await answer.json())["choices"]
            except aiohttp.ClientError:
                errors += 1
            latencies.append(time.perf_counter() - started)

        started = time.perf_counter()
        await asyncio.gather(*(ask(address) for address in addresses))
        return time.perf_counter() - started, errors, sorted(latencies)


def row(name: str, rounds: list[tuple[float, int, list[float]]]) -> tuple[float, int]:
    """Prints the best round, with the errors of all; returns its requests a second, and the errors."""
    seconds, _, latencies = min(rounds)
    errors = sum(errors for _, errors, _ in rounds)
    half, last = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    print(f"| {name} | {len(latencies)} | {errors} | {len(latencies) / seconds:.0f} | {half:.2f} | {last:.2f} |")
    return len(latencies) / seconds, errors


def main() -> None:
    """Prints the table."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    stub = subprocess.Popen([sys.executable, STUB, str(port)])
    command = [sys.executable, __file__, url]
    gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert gateway.stdout
        through = [Address(*pair) for pair in json.loads(gateway.stdout.readline())]
        direct = [Address(url, "stub-key")] * REQUESTS
        asyncio.run(ask_all(through[:50]))  # Warm, and surely up.
        rounds = [(asyncio.run(ask_all(direct)), asyncio.run(ask_all(through))) for _ in range(ROUNDS)]
        end, _ = gateway.communicate(timeout=30)
    finally:
        for process in (gateway, stub):
            process.kill()
            process.wait(timeout=10)
    print("| way | concurrent | errors | requests/s | median s | 99th percentile s |\n|---|---|---|---|---|---|")
    bare, _ = row("straight to the stub", [one for one, _ in rounds])
    ours, errors = row("through the gateway", [two for _, two in rounds])
    figures = json.loads(end)
    requests = ROUNDS * REQUESTS + 50
    assert figures["recorded"] == requests, figures
    print(
        f"\nratio {ours / bare:.2f}; {1e3 * figures['cpu'] / requests:.2f} ms of the gateway's processor time a request"
    )
    sys.exit(errors > 0)


if __name__ == "__main__":
    asyncio.run(serve_gateway(sys.argv[1])) if len(sys.argv) > 1 else main()
