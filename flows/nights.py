"""A night: so many iterations more, then it ends. Made for a schedule.

    prefect deployment run nightly/nightly

What a night is to reach is fixed when it starts and kept under its date. Tried again after a crash, or run a second
time that date, it goes on to that target and adds nothing; the next date goes on from there. Settings may differ from
night to night (new tasks, another learning rate): what earlier nights made is kept as it is.

In the end the newest checkpoint meets the champion, and is promoted where it is better.
"""

from collections.abc import Sequence
from datetime import date, datetime
from zoneinfo import ZoneInfo

from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.context import FlowRunContext
from pydantic import PositiveInt

from flows.champion import judge_the_night
from flows.parameters import Settings, go_back, run_name, settings_of
from flows.plan import Plan
from flows.run import Run
from flows.train import back_up_if_asked, improve, prune_if_asked, report_if_new
from steps.common.artifacts import Evaluation
from steps.common.nights import fix_night, newest_checkpoint
from steps.common.rewind import Rewind
from steps.common.runs import runs_folder


@flow(name="nightly", flow_run_name=run_name, persist_result=False)
def nightly(
    config: Settings,
    iterations: PositiveInt = 5,
    overrides: Sequence[str] = (),
    night: date | None = None,
    rewind: Rewind | None = None,
) -> list[Evaluation]:
    """Trains a run for one night and returns the evaluations made in it.

    Args:
        config: The run's settings: a TOML file on the machine that trains, or what would stand in it.
        iterations: Updates a night, in place of the settings' own number.
        overrides: Settings on top of the file's, like train.learning_rate=1e-3.
        night: The night to finish, YYYY-MM-DD. Without it the date that the flow run was scheduled for.
        rewind: A step to do again first: what follows from it comes back where it still fits, and is made anew else.
    """
    settings = settings_of(config, overrides)
    root = runs_folder() / settings.name
    go_back(root, rewind)
    target = fix_night(root, night or scheduled_date(), iterations)
    there = newest_checkpoint(root)
    get_run_logger().info(
        f"the night of {target.date} goes from checkpoint {target.first} to {target.last}; there is {there}"
    )
    if there > target.last:
        return []
    plan = Plan(settings.model_copy(update={"iterations": target.last}), first=min(target.first, there))
    with Run.open(plan, root, get_run_logger().info) as run:
        evaluations = improve(run)
        judge_the_night(run)
        report_if_new(run)
        back_up_if_asked(run)
        prune_if_asked(run)
        return evaluations


def scheduled_date() -> date:
    """The date for which this flow run was first scheduled, where its schedule is; it stays the same when retried."""
    context = FlowRunContext.get()
    run = context and context.flow_run
    assert run and run.expected_start_time
    schedules: list[DeploymentSchedule] = []
    if run.deployment_id:
        with get_client(sync_client=True) as client:
            schedules = client.read_deployment(run.deployment_id).schedules
    started_by = run.created_by.id if run.created_by else None
    schedules.sort(key=lambda schedule: schedule.id != started_by)
    zones = [schedule.schedule.timezone for schedule in schedules[:1] if hasattr(schedule.schedule, "timezone")]
    return date_in(run.expected_start_time, zones[0] if zones else None)


def date_in(moment: datetime, zone: str | None) -> date:
    """The date there; on this machine where no time zone is given."""
    return moment.astimezone(ZoneInfo(zone) if zone else None).date()
