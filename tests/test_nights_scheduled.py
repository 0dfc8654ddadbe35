"""Nights as Prefect schedules them: a flow run of the deployment, crashed and retried, and the one of the next date."""

from datetime import UTC, date, datetime
from pathlib import Path
from uuid import UUID

import pytest
from flow_fixtures import Steps, config_of
from prefect import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Crashed, Scheduled

from flows.nights import nightly
from steps.common.errors import InvalidInputs
from steps.common.nights import Night, fix_night, newest_checkpoint
from steps.common.status import status_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(300)]
pytestmark += [pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Prefect's own clients are not closed
MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


def deployed(config: Path) -> UUID:
    """A deployment whose nights begin at two in Kiritimati, where it is tomorrow already."""
    schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 2 * * *", timezone="Pacific/Kiritimati"))
    with get_client(sync_client=True) as client:
        return client.create_deployment(
            flow_id=client.create_flow(nightly),
            name="nightly",
            schedules=[schedule],
            parameters={"config": str(config), "iterations": 5},
        )


def scheduled(deployment: UUID, moment: datetime) -> UUID:
    """A flow run, as the scheduler makes them."""
    with get_client(sync_client=True) as client:
        return client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=moment)).id


def run(flow_run: UUID) -> None:
    """What a worker does when its time has come."""
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(flow_run)
    run_flow(nightly, flow_run=known, parameters=known.parameters)


def test_a_scheduled_night_that_crashed_ends_at_its_target(steps: Steps, runs: Path, tmp_path: Path) -> None:
    config_of(tmp_path)  # writes the file
    deployment, root = deployed(tmp_path / "night.toml"), runs / "night"
    monday = scheduled(deployment, datetime(2026, 3, 1, 12, tzinfo=UTC))
    steps.raises["checkpoints/0004"] = [InvalidInputs("crash")]
    with pytest.raises(InvalidInputs, match="crash"):
        run(monday)
    assert newest_checkpoint(root) == 3
    done = list(steps.made)

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(monday, Crashed(), force=True)  # as the automation does
        client.set_flow_run_state(monday, AwaitingRetry())
    run(monday)
    assert newest_checkpoint(root) == 5
    assert steps.made[len(done)] == "checkpoints/0004"
    assert [path for path in steps.made if steps.made.count(path) > 1] == ["checkpoints/0004"] * 2
    assert [path.name for path in (root / "nights").iterdir()] == ["2026-03-02.json"]

    run(scheduled(deployment, datetime(2026, 3, 2, 12, tzinfo=UTC)))
    assert newest_checkpoint(root) == 10
    assert fix_night(root, MONDAY, 9) == Night(date=MONDAY, first=0, last=5)
    assert fix_night(root, TUESDAY, 9) == Night(date=TUESDAY, first=5, last=10)
    assert status_of(root).state == "finished"
