"""Where a running server is, and a small client of it whose every call is limited in time."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import ValidationError

from steps.common.artifacts import Record
from steps.common.errors import ServerFault
from steps.common.storage import write_atomically
from steps.serving.settings import ServeInputs


class Endpoint(Record):
    """A server that is up, as its supervisor describes it in a file that only its user can read."""

    base_url: str
    """Ends in `/v1`."""
    api_key: str
    pid: int
    """Of vLLM, the leader of its process group."""
    model: str
    """The base model's name, which no other server has."""
    root: Path
    """The run's folder as the server finds it: another machine may have mounted it elsewhere."""
    inputs: ServeInputs
    """What it serves."""

    def write(self, file: Path) -> None:
        """Writes it for this user only: it holds a key."""
        mask = os.umask(0o077)
        try:
            write_atomically(file, self.model_dump_json().encode())
        finally:
            os.umask(mask)

    @classmethod
    def read(cls, file: Path) -> "Endpoint | None":
        """The endpoint in `file`, or None where no server is up. Raises `ServerFault` where it can't be understood."""
        try:
            return cls.model_validate_json(file.read_text())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ServerFault(f"{file} describes no server: {error.errors()[0]['msg']}") from None


class Refused(ServerFault):
    """The server answered with an error."""


class Client:
    """A blocking client for the few calls that are not rollouts. Use it as a context manager.

    Calls raise `ServerFault` where the server does not answer in time, and its subclass `Refused` where it answers with
    an error.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._root = endpoint.base_url.removesuffix("/v1")
        self._http = httpx.Client(
            base_url=endpoint.base_url,
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
            timeout=endpoint.inputs.settings.admin_timeout,
            trust_env=False,  # never through a proxy
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> dict[str, str]:
        """Served names, each with the folder or hub id it comes from."""
        return {model["id"]: model["root"] for model in self._ask("GET", "/models").json()["data"]}

    def complete(self, **request: Any) -> dict[str, Any]:
        """One completion of token ids."""
        answer: dict[str, Any] = self._ask("POST", "/completions", request).json()
        return answer

    def load_adapter(self, name: str, folder: Path) -> None:
        """Makes the adapter in `folder` answer as `name`."""
        self._ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Forgets the name; requests under way are not disturbed."""
        self._ask("POST", "/unload_lora_adapter", {"lora_name": name})

    def sleep(self) -> None:
        """Moves the weights to main memory and forgets the cache; whatever is asked now waits for `wake_up`."""
        self._ask("POST", f"{self._root}/sleep?level=1")

    def wake_up(self) -> None:
        """Undoes `sleep`; harmless where it is awake."""
        self._ask("POST", f"{self._root}/wake_up")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ServerFault(f"the model's server did not answer {path}: {type(error).__name__} {error}") from None
        if answer.is_error:
            raise Refused(f"the model's server refused {path} ({answer.status_code}): {_message(answer)}")
        return answer


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
