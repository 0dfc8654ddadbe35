"""Serves the run's policy: starts vLLM, watches it, and ends with it.

    python -m steps.serve --root runs/demo --inputs serve.json --endpoint endpoint.json --log vllm.log

No artifact comes of it. While the endpoint file exists, the server in it is up and has answered a request. Whoever
starts this holds a pipe to its standard input; when the pipe ends, so does the server: a flow that was killed leaves
nothing behind. Exit status: 0 stopped as asked, 202 wrong inputs, 1 the server ended by itself or never came up.
"""

import argparse
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Never

from pydantic import ValidationError

from steps.common.errors import InvalidInputs, ServerFault
from steps.common.models import find_model
from steps.common.step import exit_status_of
from steps.serving.command import EVERYWHERE, HOST, installed_platform, vllm_command
from steps.serving.endpoint import Endpoint
from steps.serving.settings import ServeInputs
from steps.serving.supervisor import (
    Stopped,
    last_lines,
    reserved_port,
    running,
    stop_when_asked,
    wait_until_ready,
)


def serve(
    inputs: ServeInputs, root: Path, endpoint_file: Path, log: Path, host: str = HOST, fixed_port: int = 0
) -> Never:
    """Serves until `Stopped` or `ServerFault` is raised, and raises that. Raises `InvalidInputs` before it starts."""
    model = find_model(root, inputs.base_model)
    name = f"base-{secrets.token_hex(4)}"
    api_key = os.environ.get("NIGHTSCHOOL_SERVE_KEY") or secrets.token_urlsafe(32)
    platform = installed_platform()
    endpoint_file.unlink(missing_ok=True)
    with reserved_port(fixed_port) as port:
        command = vllm_command(inputs, model, name, port, api_key, platform, host=host)
        started = time.monotonic()
        with running(command, log) as process:
            endpoint = Endpoint(
                base_url=f"http://{HOST if host == EVERYWHERE else host}:{port}/v1",
                api_key=api_key,
                pid=process.pid,
                model=name,
                root=root.resolve(),
                inputs=inputs,
            )
            wait_until_ready(endpoint, alive=lambda: process.poll() is None)
            try:
                if process.poll() is None:
                    endpoint.write(endpoint_file)
                    print(f"vLLM answers on port {port} after {time.monotonic() - started:.1f} s", flush=True)
                status = process.wait()
            finally:
                endpoint_file.unlink(missing_ok=True)
    # vLLM exits with 0 even where its engine was killed: nobody asked it to end.
    print(last_lines(log), flush=True)
    raise ServerFault(f"vLLM ended by itself with status {status}; the lines above end {log}")


def read_inputs(file: Path) -> ServeInputs:
    """Reads inputs from JSON. Raises `InvalidInputs`."""
    try:
        return ServeInputs.model_validate_json(file.read_text())
    except FileNotFoundError:
        raise InvalidInputs(f"there is no inputs file {file}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInputs(f"{file}: {where}: {first['msg']} (got {first['input']!r})") from None


def main(arguments: list[str] | None = None) -> Never:
    """Runs as a command."""
    parser = argparse.ArgumentParser(prog="python -m steps.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the run's folder")
    parser.add_argument("--inputs", type=Path, required=True, help="a JSON file")
    parser.add_argument("--endpoint", type=Path, required=True, help="the file to write once the server is up")
    parser.add_argument("--log", type=Path, required=True, help="the file that vLLM's output is appended to")
    parser.add_argument("--host", default=HOST, help="the address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on (default: a free one)")
    parser.add_argument("--no-lifeline", action="store_true", help="go on when standard input ends")
    given = parser.parse_args(arguments)

    def work() -> None:
        stop_when_asked(lifeline=not given.no_lifeline)
        try:
            serve(read_inputs(given.inputs), given.root, given.endpoint, given.log, given.host, given.port)
        except Stopped:
            print("stopped", flush=True)

    sys.exit(exit_status_of(work))


if __name__ == "__main__":
    main()
