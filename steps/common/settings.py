"""Settings that more than one step needs."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from environments import Environment, Split, Task, UnknownEnvironment, load
from steps.common.artifacts import Record
from steps.common.errors import InvalidInputs

Dtype = Literal["float32", "bfloat16"]


class EnvironmentSettings(Record):
    """The environment and its options."""

    name: str
    """A shipped environment, `package.module:Class`, `package.module:function` with the option `file`, or `program`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The environment's own fields."""

    def load(self) -> Environment:
        """Makes the environment. Raises `InvalidInputs`."""
        try:
            return load(self.name, **self.options)
        except UnknownEnvironment as error:
            raise InvalidInputs(str(error)) from None

    def tasks(self, split: Split) -> Sequence[Task]:
        """The environment's tasks of a split. Raises `InvalidInputs`."""
        try:
            return self.load().tasks(split)
        except UnknownEnvironment as error:
            raise InvalidInputs(str(error)) from None


class SamplingSettings(Record):
    """How the policy samples. Nothing else may shape the distribution: no top-p, no top-k."""

    temperature: float = 1.0
    """Divides the logits, in the server and in the trainer's loss."""
    max_tokens: int = 512
    """Most tokens a call may sample."""


class LoraSettings(Record):
    """The adapter that is trained."""

    rank: Literal[1, 8, 16, 32, 64, 128, 256] = 16
    """The ranks that vLLM serves."""
    alpha: int = 32
    """What the adapter adds is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the wrapped modules, as both PEFT and vLLM know them."""
