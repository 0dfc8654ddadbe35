"""What may be set of work pools. Apart from the runtime itself, so that reading settings loads no Prefect."""

from typing import Literal

from pydantic import Field

from steps.common.artifacts import Record


class PoolSettings(Record):
    """A deployment run a step: on whatever machines the deployments' work pools have."""

    type: Literal["pool"]
    flow: str = "step/flow"
    """The deployment that plays, groups and collates."""
    train: str = "step/train"
    """The deployment that trains, and makes what training starts from."""
    serve: str = "serve/model"
    """The deployment that serves the model."""
    shared_disk: bool = True
    """Do all machines have the runs folder? Where not, they share the bucket of the backups, and nothing else."""
    poll: float = Field(2.0, gt=0)
    """Seconds between two looks at a run."""
    start_timeout: float = Field(3600.0, gt=0)
    """Seconds that a worker may take to start a run: it may have to be given a machine first."""
