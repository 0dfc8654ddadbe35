"""Plays held-out tasks with a model that is no checkpoint of the run, so that it can be compared with those.

The tasks, the seeds, the environment and its limits are those of the checkpoints' evaluations. A model of another
maker is asked at any server with OpenAI's API; its key stays in its environment variable.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from steps.agent.foreign import NO_KEY
from steps.agent.session import PlayInputs
from steps.agent.shard import sweep_shard
from steps.agent.summary import held_out
from steps.agent.upstream import Endpoint
from steps.common.artifacts import ModelEvaluation, OtherModel, Record, Usage
from steps.common.errors import InvalidInputs
from steps.common.step import Step, Workspace
from steps.evaluate import play_held_out
from steps.judge.settings import Prices, price_of


class ModelServer(Record):
    """Where a model of another maker is asked."""

    base_url: str = "https://api.openai.com/v1"
    """Of any server with OpenAI's API; ends in `/v1`, as a rule."""
    key_variable: str | None = None
    """The environment variable with the server's key, set where steps run. Without it none is sent, but for OpenAI's
    own server OPENAI_API_KEY."""
    prices: Prices | None = None
    """To be told what it cost, in whatever currency they are."""

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.base_url} is no address like https://api.openai.com/v1")
        if parts.username or parts.password:
            raise ValueError("the address holds a password: put it in a variable, and name that as key_variable")
        return self

    def endpoint(self, model: str, environment: Mapping[str, str] = os.environ) -> Endpoint:
        """The server as rollouts know it. Raises `InvalidInputs` where the key is not in the environment."""
        is_openai = urlsplit(self.base_url).hostname == "api.openai.com"
        variable = self.key_variable or ("OPENAI_API_KEY" if is_openai else None)
        key = environment.get(variable) if variable else NO_KEY
        if not key:
            raise InvalidInputs(f"{variable}, which holds the key of {self.base_url}, is not set where steps run")
        return Endpoint(self.base_url.rstrip("/"), key, model, exact=False)


class EvaluateModelInputs(PlayInputs):
    """The held-out tasks are in `tasks`."""

    operational: ClassVar[frozenset[str]] = PlayInputs.operational | {"server"}

    model: OtherModel
    server: ModelServer | None = None
    """None where the flow has it served by vLLM, as it does checkpoints."""

    def endpoint(self) -> Endpoint:
        return self.server.endpoint(self.model.name) if self.server else super().endpoint()


def evaluate_model(inputs: EvaluateModelInputs, workspace: Workspace) -> dict[str, Any]:
    """Play held-out tasks with another model and average its rewards."""
    trajectories = play_held_out(inputs, workspace, iteration=None)
    usage = Usage(
        answers=sum(t.turns for t in trajectories),
        prompt_tokens=sum(t.prompt_tokens for t in trajectories),
        completion_tokens=sum(t.completion_tokens for t in trajectories),
    )
    if inputs.server and inputs.server.prices:
        workspace.measured["price"] = price_of(usage, inputs.server.prices)
    return {"model": inputs.model.model_dump(), "usage": usage.model_dump(), **held_out(trajectories)}


EVALUATE_MODEL = Step("evaluate_model", EvaluateModelInputs, ModelEvaluation, evaluate_model, tidy=sweep_shard)

if __name__ == "__main__":
    EVALUATE_MODEL.main()
