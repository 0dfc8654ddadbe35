"""The loop: play, group, collate, train, evaluate. Each verb is a step; each step that was finished is not done again.

    nightschool train configs/demo.toml

The same command continues a run wherever it stopped, and so does retrying its flow run.
"""

from collections.abc import Sequence

from prefect import flow, get_run_logger, unmapped

from flows import tasks
from flows.parameters import Settings, go_back, run_name, settings_of
from flows.plan import Plan
from flows.run import Run
from steps.common import layout
from steps.common.artifacts import BaseModelFiles, Batch, Checkpoint, Evaluation, Groups, Rollouts
from steps.common.backups import stop_where_too_many
from steps.common.errors import NightschoolError
from steps.common.origin import Origin, origin_of
from steps.common.retention import RetentionSettings
from steps.common.rewind import Rewind
from steps.common.runs import runs_folder
from steps.evaluate import EVALUATE
from steps.initialize import InitializeInputs


class NothingToLearn(NightschoolError):
    """Iteration after iteration, no group had attempts that differ."""


@flow(name="train", flow_run_name=run_name, persist_result=False)
def train(config: Settings, overrides: Sequence[str] = (), rewind: Rewind | None = None) -> list[Evaluation]:
    """Trains a run to its last iteration and returns the evaluations made on the way.

    Args:
        config: The run's settings: a TOML file on the machine that trains, or what would stand in it.
        overrides: Settings on top of the file's, like train.learning_rate=1e-3.
        rewind: A step to do again first: what follows from it comes back where it still fits, and is made anew else.
    """
    settings = settings_of(config, overrides)
    root = runs_folder() / settings.name
    go_back(root, rewind)
    with Run.open(Plan(settings), root, get_run_logger().info) as run:
        evaluations = improve(run)
        prune_if_asked(run)
        return evaluations


def improve(run: Run) -> list[Evaluation]:
    """The loop, from the plan's first checkpoint to its last."""
    plan = run.plan
    run.record()
    checkpoint, evaluations, idle = start(run), [], 0
    for _ in range(plan.first, plan.config.iterations):
        serve_if_needed(run, checkpoint)
        evaluations += evaluate_if_due(run, checkpoint)
        rollouts = roll_out(run, checkpoint)
        groups = tasks.group.submit(run, plan.group(rollouts)).result()
        batch = tasks.collate.submit(run, plan.collate(groups, rollouts)).result()
        checkpoint = tasks.train.submit(run, plan.train(checkpoint, batch)).result()
        report_if_new(run)
        back_up_if_asked(run)
        idle = count_idle(run, idle, groups, batch)
    serve_if_needed(run, checkpoint)
    evaluations += evaluate_if_due(run, checkpoint)
    report_if_new(run)
    back_up_if_asked(run)
    return evaluations


def start(run: Run) -> Checkpoint:
    """The checkpoint to start from; 0 is on a base model that may have to be made first."""
    origin = origin_of(run.root)
    first = first_checkpoint(run, run.plan.initialize(made_base(run, origin), origin))
    return run.read(Checkpoint, layout.checkpoint(run.plan.first)) if run.plan.first else first


def first_checkpoint(run: Run, inputs: InitializeInputs) -> Checkpoint:
    """Checkpoint 0: an untrained adapter or a fork's, and where the settings say so after it imitated examples."""
    wanted = run.plan.demonstrations(inputs, run.root)
    if wanted is None:
        return tasks.initialize.submit(run, inputs).result()
    examples = tasks.demonstrations.submit(run, wanted).result()
    return tasks.sft.submit(run, run.plan.sft(inputs, examples)).result()


def made_base(run: Run, origin: Origin | None) -> BaseModelFiles | None:
    """The base model that the run makes first, where the settings say so. A fork brought along what its origin made."""
    if run.plan.config.model.pretrain is None:
        return None
    if origin is None:
        return tasks.pretrain.submit(run, run.plan.pretrain()).result()
    return run.read(BaseModelFiles, layout.MODEL) if origin.checkpoint.base_model == layout.MODEL else None


def serve_if_needed(run: Run, checkpoint: Checkpoint) -> None:
    """Has the model server up for the checkpoint where something of it is still to be played."""
    if run.is_unplayed(checkpoint) and not run.is_pruned(checkpoint):
        tasks.serve.submit(run, checkpoint).result()


def evaluate_if_due(run: Run, checkpoint: Checkpoint) -> list[Evaluation]:
    """The checkpoint's evaluation, or nothing."""
    if not run.plan.evaluation_is_due(checkpoint.iteration):
        return []
    inputs = run.plan.evaluate(checkpoint)
    if run.is_pruned(checkpoint) and not run.finished(EVALUATE, inputs, layout.evaluation(checkpoint.iteration)):
        get_run_logger().warning(f"{checkpoint.path} is not evaluated: it was pruned")
        return []
    return [tasks.evaluate.submit(run, inputs).result()]


def roll_out(run: Run, checkpoint: Checkpoint) -> list[Rollouts]:
    """All shards of the checkpoint's iteration, side by side; where one fails, the others still finish."""
    shards = tasks.rollout.map(unmapped(run), run.plan.shards(checkpoint))
    shards.wait()
    return shards.result()


def report_if_new(run: Run) -> None:
    """The report, where anything was made since the last one. Where it fails, its task does, and nothing stops."""
    if run.news:
        run.news = False
        tasks.report.submit(run).wait()


def back_up_if_asked(run: Run) -> None:
    """Sends what is new to the bucket, where there is one. Where it fails, its task does; too often stops the run."""
    if run.bucket and run.unsaved:
        run.unsaved = False
        tasks.backup.submit(run, run.bucket).wait()
        stop_where_too_many(run.root, run.plan.config.backup)


def prune_if_asked(run: Run) -> None:
    """Makes room where the settings say how. Where it fails, its task does, and the night was none the worse."""
    if run.plan.config.retention != RetentionSettings():
        tasks.prune.submit(run).wait()


def count_idle(run: Run, idle: int, groups: Groups, batch: Batch) -> int:
    """Iterations in a row without anything to learn from. Raises `NothingToLearn` where they are too many."""
    idle = idle + 1 if batch.sequences == 0 else 0
    if idle:
        why = ", ".join(f"{count} {reason}" for reason, count in groups.dropped.items())
        get_run_logger().warning(
            f"iteration {groups.iteration} had nothing to learn from: of {groups.groups} groups, {why}"
        )
    if idle >= run.plan.config.stop_after_idle:
        raise NothingToLearn(
            f"{idle} iterations in a row had nothing to learn from (the last: of {groups.groups} groups, {why}): "
            f"try tasks that are neither too easy nor too hard, a higher temperature, or larger groups"
        )
    return idle
