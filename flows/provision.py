"""What `nightschool up` keeps on Prefect's server beside the deployments. Looked up by name, made where missing."""

from collections.abc import Iterator
from datetime import timedelta

from prefect import get_client
from prefect.automations import AutomationCore, EventTrigger
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import DeploymentSort
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

SILENCE = 90
"""Seconds without a heartbeat, of which there are two a minute: too few would call a busy flow run crashed."""
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}


def ensure_pool(name: str) -> None:
    """A work pool whose flow runs are processes of the worker's machine."""
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template))


def deployed_in(pool: str) -> Iterator[str]:
    """The deployments of a work pool, with their schedules."""
    with get_client(sync_client=True) as client:
        found = client.read_deployments(
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])), sort=DeploymentSort.NAME_ASC
        )
        for deployment in found:
            crons = [
                f"{entry.schedule.cron} {entry.schedule.timezone}"
                for entry in deployment.schedules
                if entry.active and isinstance(entry.schedule, CronSchedule)
            ]
            name = f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"
            yield f"{name} ({', '.join(crons)})" if crons else name


def ensure_automation() -> None:
    """Flow runs of which nothing is heard any more become Crashed, so that they can be retried."""
    wanted = zombies_crash()
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(wanted.name):
            client.create_automation(wanted)


def zombies_crash() -> AutomationCore:
    """The automation: a heartbeat of one of our flows that neither another nor an end follows."""
    return AutomationCore(
        name="nightschool: crash flow runs that were killed",
        description=f"No heartbeat for {SILENCE} s: the flow run and its worker were killed, or their machine was.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": ["train", "nightly"]}
            ),
            for_each={"prefect.resource.id"},
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDED},
            threshold=1,
            within=timedelta(seconds=SILENCE),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {SILENCE} s")],
    )
