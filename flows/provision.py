"""What `nightschool up` keeps on Prefect's server beside the deployments. Looked up by name, made where missing."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from prefect import get_client
from prefect.automations import AutomationCore, EventTrigger
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import DeploymentSort
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

SILENCE = 90
"""Seconds without a heartbeat, of which `prefect.yaml` asks for two a minute: fewer would make busy flow runs crash."""
OURS = ["train", "nightly", "evaluate", "promote", "restore", "step", "serve"]
"""Flows. A step whose machine died is asked for again by the flow that waits for it, once it is called crashed."""
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}


def ensure_pool(name: str, type: str, template: dict[str, Any]) -> None:
    """A work pool. One that is there stays as it is: its template may have been edited."""
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=name, type=type, base_job_template=template))


def ensure_template(pool: str, template: dict[str, Any]) -> None:
    """A work pool makes its jobs from this template, whatever it made them from before."""
    with get_client(sync_client=True) as client:
        if client.read_work_pool(pool).base_job_template != template:
            client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))


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
        there = client.read_automations_by_name(wanted.name)
        if not there:
            client.create_automation(wanted)
        elif there[0].model_dump(include=set(AutomationCore.model_fields)) != wanted.model_dump():
            client.update_automation(there[0].id, wanted)


def zombies_crash() -> AutomationCore:
    """The automation: a heartbeat of one of our flows that neither another nor an end follows."""
    return AutomationCore(
        name="nightschool: crash flow runs that were killed",
        description=f"No heartbeat for {SILENCE} s: the flow run and its worker were killed, or their machine was.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": OURS}),
            for_each={"prefect.resource.id"},
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDED},
            threshold=1,
            within=timedelta(seconds=SILENCE),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {SILENCE} s")],
    )
