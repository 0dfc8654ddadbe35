"""What the flows take, as Prefect's form and `prefect deployment run --param` give it."""

from collections.abc import Sequence
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import flow_run

from flows.config import RunConfig
from steps.common.errors import InvalidInputs
from steps.common.rewind import Rewind, rewind, was_rewound

Settings = Path | RunConfig
"""A file where the flow runs, or what would stand in it."""


def settings_of(config: Settings, overrides: Sequence[str]) -> RunConfig:
    """The settings of a run that is to be trained. Raises `InvalidInputs`: a line for each thing that is wrong."""
    if isinstance(config, Path):
        return RunConfig.from_toml(config, overrides).to_train()
    if overrides:
        raise InvalidInputs("overrides go on top of a file; config holds the settings themselves: change them there")
    return config.to_train()


def go_back(root: Path, target: Rewind | None) -> None:
    """Rewinds the run at `root`, once a flow run: where it is retried, it goes on from where it is."""
    asked_by = flow_run.get_id()
    if target and asked_by and not was_rewound(root, asked_by):
        folder, paths = rewind(root, target, asked_by)
        get_run_logger().info(f"set {len(paths)} folders aside in {folder}, from {paths[0]} to {paths[-1]}")


def run_name() -> str:
    """The flow run's name: the run's, or the file's where that can't be read."""
    config = flow_run.get_parameters()["config"]
    if isinstance(config, RunConfig):
        return config.name
    if isinstance(config, dict):
        return str(config.get("name"))
    return Path(config).stem
