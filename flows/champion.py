"""The challenger meets the champion: by itself after a night, and whenever one asks for it.

    nightschool promote demo

What both have to have played is what the run evaluates, by the settings that it was last trained with: the same tasks,
the same seeds. What is there is used; what is not, or was made by earlier settings, is played first.
"""

from pathlib import Path

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import NonNegativeInt

from flows import tasks
from flows.checkpoints import contenders, iteration_of
from flows.config import recorded_config
from flows.evaluate import played
from flows.plan import Plan
from flows.run import Run
from steps.common import layout
from steps.common.artifacts import Champion, Checkpoint, Evaluation, read_artifact, read_manifest
from steps.common.champion import judged
from steps.common.runs import find_run
from steps.evaluate import EvaluateInputs


def run_name() -> str:
    """The flow run's name: the run's."""
    return Path(flow_run.get_parameters()["run"]).name


@flow(name="promote", flow_run_name=run_name, persist_result=False)
def promote(run: str, iteration: NonNegativeInt | None = None) -> Champion:
    """Has a checkpoint meet the run's champion, and returns the decision.

    Raises `RunInUse` where the run is trained at the moment.

    Args:
        run: The run's name.
        iteration: The checkpoint's number. Without it the newest that is finished.
    """
    root = find_run(run)
    with Run.open(Plan(recorded_config(root)), root, get_run_logger().info) as opened:
        return meet(opened, *contenders(root, iteration))


def judge_the_night(run: Run) -> Champion:
    """Has the newest checkpoint meet the champion, once: a night that is tried again leaves a rollback alone."""
    newest = read_artifact(Checkpoint, run.root, layout.checkpoint(iteration_of(run.root, None)))
    if decision := judged(run.root, newest):
        get_run_logger().info(f"checkpoint {newest.iteration} was {decision.decision} before: {decision.reason}")
        return decision
    return meet(run, *contenders(run.root, None))


def meet(run: Run, challenger: Checkpoint, champion: Checkpoint) -> Champion:
    """Promotes the challenger, or keeps it."""
    played = held_out(run, challenger), held_out(run, champion)
    decision = tasks.promote.submit(run, run.plan.promote(challenger, champion, *played)).result()
    get_run_logger().info(f"{decision.decision}: {decision.reason}")
    return decision


def held_out(run: Run, checkpoint: Checkpoint) -> Evaluation:
    """What the checkpoint makes of the held-out tasks of today's settings."""
    inputs = run.plan.evaluate(checkpoint)
    return played(run, inputs, evaluation_path(run.root, inputs))


def evaluation_path(root: Path, inputs: EvaluateInputs) -> str:
    """The usual place; another where an evaluation by earlier settings is there, which is kept as it is."""
    usual = layout.evaluation(inputs.checkpoint.iteration)
    manifest = read_manifest(root / usual)
    if manifest is None or manifest.fingerprint == inputs.fingerprint():
        return usual
    return layout.evaluation_anew(inputs.checkpoint.iteration, inputs.fingerprint())
