"""A run comes back from the bucket: for a machine that is worked by Prefect alone.

prefect deployment run restore/on-demand --param run=demo
"""

from typing import Literal

from prefect import flow, get_run_logger
from pydantic import NonNegativeInt

from steps.common.runs import runs_folder
from steps.remote.settings import BucketSettings, required
from steps.restore import Restored
from steps.restore import restore as bring_back


@flow(name="restore", flow_run_name="{run}", persist_result=False)
def restore(
    run: str,
    iteration: NonNegativeInt | None = None,
    origin: str | None = None,
    only: Literal["checkpoints"] | None = None,
) -> Restored:
    """Rebuilds a run from its backup, or brings back what is missing of it. Interrupted, the same again goes on.

    Args:
        run: The run's name, there and here.
        iteration: To this checkpoint, so that training goes on from it. Without it all there is.
        origin: Where backups are, s3://bucket/prefix. Without it the working machine's BACKUP_BUCKET and BACKUP_PREFIX.
        only: Nothing but checkpoints: enough to serve.
    """
    settings = BucketSettings.at(origin) if origin else required()
    return bring_back(settings, run, runs_folder() / run, iteration, only, get_run_logger().info)
