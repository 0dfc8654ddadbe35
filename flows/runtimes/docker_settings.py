"""What may be set of containers. Apart from the runtime itself, so that reading settings loads no Docker SDK."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from steps.common.artifacts import Record

Gpus = Literal["all"] | int | list[str]
SIZE = r"^\d+[kmg]$"


class ContainerSettings(Record):
    """An image and what its containers may use."""

    image: str | None = None
    """By itself Nightschool's own of this version; it must be on the machine: none is pulled."""
    memory: str | None = Field(None, pattern=SIZE)
    """Most memory, /tmp included, like `16g`. None is no limit."""
    cpus: float | None = Field(None, gt=0)
    """Most CPU time, in cores."""
    pids: int = Field(4096, ge=1)
    """Most processes and threads."""
    shm: str = Field("1g", pattern=SIZE)
    """Size of /dev/shm."""
    tmp: str = Field("4g", pattern=SIZE)
    """Size of /tmp, which is in memory."""


class DockerSettings(Record):
    """A container a step."""

    type: Literal["docker"]
    parallel: int = Field(2, ge=1)
    """Most steps at a time, for shards of rollouts."""
    gpus: Gpus | None = None
    """Of serving and training: `all`, how many, or a list of ids. None is none."""
    model_cache: Path | None = None
    """The Hugging Face cache to read models from, when `model.base` is a hub id: no container may download."""
    rollout: ContainerSettings = ContainerSettings()
    """Of rollout, evaluate, group and collate."""
    serve: ContainerSettings = ContainerSettings()
    train: ContainerSettings = ContainerSettings()
