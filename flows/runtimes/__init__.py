"""Where steps run. A runtime is a module with settings and a Runtime; adding one is that file and two lines."""

from pathlib import Path

from flows.runtimes.base import Runtime
from flows.runtimes.docker_settings import DockerSettings
from flows.runtimes.inline import InlineRuntime, InlineSettings
from flows.runtimes.pool_settings import PoolSettings
from flows.runtimes.process import ProcessRuntime, ProcessSettings

RuntimeSettings = InlineSettings | ProcessSettings | DockerSettings | PoolSettings


def make_runtime(settings: RuntimeSettings, root: Path) -> Runtime:
    """The runtime that `settings` describe, for the run at `root`."""
    match settings:
        case InlineSettings():
            return InlineRuntime(root, settings)
        case ProcessSettings():
            return ProcessRuntime(root, settings)
        case DockerSettings():
            from flows.runtimes.docker import DockerRuntime  # its SDK takes a while to load

            return DockerRuntime(root, settings)
        case PoolSettings():
            from flows.runtimes.pool import PoolRuntime  # and so does Prefect

            return PoolRuntime(root, settings)
