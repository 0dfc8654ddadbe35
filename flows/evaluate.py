"""Plays a run's held-out tasks with one of its checkpoints, whenever one wants to know.

    prefect deployment run evaluate/on-demand --param run=demo

The settings are those in `run.json`, the tasks and seeds those of training's own evaluations: the results compare, and
an evaluation that is there already is not made again. The run's record stays as it is.
"""

from pathlib import Path

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import NonNegativeInt

from flows import tasks
from flows.checkpoints import iteration_of
from flows.config import recorded_config
from flows.plan import Plan
from flows.run import Run
from flows.train import report_if_new
from steps.common import layout
from steps.common.artifacts import Checkpoint, Evaluation
from steps.common.runs import find_run
from steps.evaluate import EVALUATE, EvaluateInputs


def run_name() -> str:
    """The flow run's name: the run's, and the iteration where it is asked for."""
    asked = flow_run.get_parameters()
    name = Path(asked["run"]).name
    return name if asked["iteration"] is None else f"{name} {asked['iteration']:04d}"


@flow(name="evaluate", flow_run_name=run_name, persist_result=False)
def evaluate(run: str, iteration: NonNegativeInt | None = None) -> Evaluation:
    """Plays the held-out tasks of a run with one of its checkpoints, and returns how it did.

    Raises `RunInUse` where the run is trained at the moment.

    Args:
        run: The run's name.
        iteration: The checkpoint's number. Without it the newest that is finished.
    """
    root = find_run(run)
    plan = Plan(recorded_config(root))
    with Run.open(plan, root, get_run_logger().info) as opened:
        checkpoint = opened.read(Checkpoint, layout.checkpoint(iteration_of(root, iteration)))
        evaluation = played(opened, plan.evaluate(checkpoint), layout.evaluation(checkpoint.iteration))
        report_if_new(opened)
        return evaluation


def played(run: Run, inputs: EvaluateInputs, path: str) -> Evaluation:
    """The evaluation at `path`, with the model server up for its checkpoint where it is still to be made."""
    if run.finished(EVALUATE, inputs, path) is None:
        tasks.serve.submit(run, inputs.checkpoint).result()
    return tasks.evaluate.submit(run, inputs, path).result()
