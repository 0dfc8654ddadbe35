"""The model server of a run, as the flow sees it: up and answering for a checkpoint, or an error.

Serving is a scope and not a step: the server starts when something must be played, stays up across iterations, and is
stopped in the end. It is up for a checkpoint only once it has answered the checkpoint's probe as the trainer did.
Where one GPU is shared, it gives way to training: it rests, and is up again when something must be played.
"""

from pathlib import Path
from threading import Lock
from typing import Protocol

from flows.config import RunConfig
from flows.runtimes.base import Say, Service
from steps.common.artifacts import Checkpoint
from steps.common.errors import ServerFault
from steps.serving.adapters import PolicyEndpoint, load_adapter, unload_adapter
from steps.serving.endpoint import Client, Endpoint
from steps.serving.settings import ServeInputs


class Host(Protocol):
    """Who starts a model server, for the run at `root`: its runtime, or whoever serves it by day."""

    root: Path

    def serve(self, inputs: ServeInputs, say: Say) -> Service:
        """Starts a model server and returns it when it is ready. Raises `InvalidInputs` and `ServerFault`."""

    def lend(self, checkpoint: Checkpoint) -> None:
        """Has the checkpoint's files where the server finds them. Raises `ServerFault`."""


class ModelServer:
    """Serves one checkpoint at a time. Thread-safe: shards that play side by side ask for the same one."""

    def __init__(self, host: Host, config: RunConfig) -> None:
        self._host, self._config = host, config
        self._starts_left = config.serve.max_restarts + 1
        self._lock = Lock()
        self._service: Service | None = None
        self._served: tuple[Checkpoint, PolicyEndpoint] | None = None
        self._asleep = False

    def ensure(self, checkpoint: Checkpoint, say: Say) -> PolicyEndpoint:
        """Where `checkpoint` can be played. Starts the server where it is not up, loads and probes the adapter.

        Raises `WrongWeights` where the server does not answer as the checkpoint, `InvalidInputs` where it can't be
        served, and `ServerFault` where the server does not come up, or died too often.
        """
        with self._lock:
            endpoint = self._endpoint(checkpoint.base_model, say)
            if self._woken(endpoint, say) or self._served is None or self._served[0] != checkpoint:
                self._served = checkpoint, self._load(endpoint, checkpoint, say)
            return self._served[1]

    def ensure_base(self, base_model: str, say: Say) -> Endpoint:
        """Where the base model itself can be played. Starts the server where it is not up.

        Call it where no adapter was loaded: vLLM 0.32 on a CPU may answer for the base with an adapter at work.
        Raises `InvalidInputs` and `ServerFault` as `ensure` does.
        """
        with self._lock:
            endpoint = self._endpoint(base_model, say)
            self._woken(endpoint, say)
            return endpoint

    def rest(self, say: Say) -> None:
        """Leaves the GPU to whoever trains, where `serve.while_training` asks for it; `ensure` ends that."""
        with self._lock:
            if not (self._service and self._service.alive()) or self._asleep:
                return
            match self._config.serve.while_training:
                case "stop":
                    self.close()
                    self._starts_left += 1  # it did not die
                    say("the model server is stopped while a checkpoint is trained")
                case "sleep":
                    self._put_to_sleep(self._service, say)

    def close(self) -> None:
        """Stops the server where it is up."""
        if self._service:
            self._service.stop()
        self._service = self._served = None
        self._asleep = False

    def _put_to_sleep(self, service: Service, say: Say) -> None:
        """A server that does not fall asleep is ended: training must have the memory."""
        try:
            if endpoint := Endpoint.read(service.endpoint):
                with Client(endpoint) as client:
                    client.sleep()
                self._asleep = True
                say("the model server sleeps while a checkpoint is trained")
        except ServerFault as fault:
            say(f"the model server is stopped, since it does not fall asleep: {fault}")
            self.close()

    def _woken(self, endpoint: Endpoint, say: Say) -> bool:
        """Whether it slept until now: then its weights have been elsewhere, and must be probed again.

        Raises `ServerFault` where it does not wake up, and ends it then: another attempt starts a new one.
        """
        if not self._asleep:
            return False
        try:
            with Client(endpoint) as client:
                client.wake_up()
        except ServerFault:
            self.close()
            raise
        self._asleep = False
        say("the model server is awake")
        return True

    def _endpoint(self, base_model: str, say: Say) -> Endpoint:
        if self._service and (endpoint := Endpoint.read(self._service.endpoint)) and self._service.alive():
            return endpoint
        if self._service:
            say("the model server is gone; it is started again")
        self.close()
        if self._starts_left == 0:
            raise ServerFault(f"the model server died {self._config.serve.max_restarts + 1} times (serve.max_restarts)")
        self._starts_left -= 1
        self._service = self._host.serve(self._inputs(base_model), say)
        if endpoint := Endpoint.read(self._service.endpoint):
            return endpoint
        raise ServerFault("the model server ended as soon as it was ready")

    def _load(self, endpoint: Endpoint, checkpoint: Checkpoint, say: Say) -> PolicyEndpoint:
        self._host.lend(checkpoint)
        policy = load_adapter(endpoint, self._host.root, checkpoint)
        say(f"the model server answers for {checkpoint.path} as {policy.model} ({policy.verdict.rms:.1e} nats off)")
        if self._served and self._served[1].model != policy.model:  # what the one before had to play is played
            unload_adapter(endpoint, self._served[1].model)
        return policy

    def _inputs(self, base_model: str) -> ServeInputs:
        return ServeInputs(
            base_model=base_model,
            dtype=self._config.model.dtype,
            lora=self._config.lora,
            settings=self._config.serve,
        )


def environment_of(policy: PolicyEndpoint | Endpoint) -> dict[str, str]:
    """How a step is told where its policy is: it differs from attempt to attempt, so it is no part of its inputs."""
    return {
        "NIGHTSCHOOL_POLICY_URL": policy.base_url,
        "NIGHTSCHOOL_POLICY_KEY": policy.api_key,
        "NIGHTSCHOOL_POLICY_MODEL": policy.model,
    }
