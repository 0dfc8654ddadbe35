"""One Prefect task a step: its name, its tags, how often it is tried.

Resumption is the manifests' business alone, so Prefect's results and cache are off. A task that finds its artifact
shows as `Reused`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from flows.progress import shown
from flows.report import show_report
from flows.run import Host, Run
from steps.backup import backup as send
from steps.collate import COLLATE, CollateInputs
from steps.common import layout
from steps.common.artifacts import (
    BaseModelFiles,
    Batch,
    Champion,
    Checkpoint,
    Demonstrations,
    Evaluation,
    Groups,
    ModelEvaluation,
    Rollouts,
)
from steps.common.champion import decision_path, incumbent
from steps.common.errors import InvalidInputs, NightschoolError, WrongWeights
from steps.common.runs import locked
from steps.common.step import ArtifactT, InputsT, Step
from steps.demonstrations import DEMONSTRATIONS, DemonstrationsInputs
from steps.evaluate import EVALUATE, EvaluateInputs
from steps.evaluate_model import EVALUATE_MODEL, EvaluateModelInputs
from steps.group import GROUP, GroupInputs
from steps.initialize import INITIALIZE, InitializeInputs
from steps.pretrain import PRETRAIN, PretrainInputs
from steps.promote import PROMOTE, PromoteInputs
from steps.prune import backed_up
from steps.prune import prune as make_room
from steps.remote.settings import BucketSettings
from steps.rollout import ROLLOUT, RolloutInputs
from steps.sft import SFT, SftInputs
from steps.train import TRAIN, TrainInputs

P = ParamSpec("P")
R = TypeVar("R")
DELAYS = [1.0, 10.0]
"""Seconds before the second and the third attempt."""


def tried_again(name: str, *tags: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """The decorator of every step: what crashed or was killed may have had bad luck."""
    return task(
        task_run_name=name,
        tags=tags,
        retries=len(DELAYS),
        retry_delay_seconds=DELAYS,
        retry_condition_fn=worth_retrying,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def worth_retrying(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Anything but wrong inputs, and a server whose answers can't be trusted."""
    return not isinstance(state.result(raise_on_failure=False), InvalidInputs | WrongWeights)


@tried_again("pretrain", "train")
def pretrain(run: Run, inputs: PretrainInputs) -> BaseModelFiles:
    """Makes the tiny base model."""
    return made(run, PRETRAIN, inputs, layout.MODEL)


@tried_again("initialize", "train")
def initialize(run: Run, inputs: InitializeInputs) -> Checkpoint:
    """Makes checkpoint 0."""
    return made(run, INITIALIZE, inputs, layout.checkpoint(0))


@tried_again("demonstrations")
def demonstrations(run: Run, inputs: DemonstrationsInputs) -> Demonstrations:
    """Gathers examples, here: where other steps run, their source may not be."""
    if done := run.finished(DEMONSTRATIONS, inputs, layout.DEMONSTRATIONS):
        return reused(layout.DEMONSTRATIONS, done)
    gathered = run.make_here(DEMONSTRATIONS, inputs, layout.DEMONSTRATIONS)
    left_out = ", ".join(f"{count} {reason}" for reason, count in gathered.dropped.items()) or "nothing"
    get_run_logger().info(f"gathered {gathered.examples} examples ({gathered.source}); left out: {left_out}")
    return gathered


@tried_again("sft", "train")
def sft(run: Run, inputs: SftInputs) -> Checkpoint:
    """Makes checkpoint 0 from examples."""
    return made(run, SFT, inputs, layout.checkpoint(0))


@tried_again("serve {checkpoint.iteration:04d}", "serve")
def serve(run: Run, checkpoint: Checkpoint) -> None:
    """Has the model server up for a checkpoint: no artifact, so never reused."""
    run.serve(checkpoint, get_run_logger().info)


@tried_again("rollout {inputs.iteration:04d}/{inputs.shard:03d}", "serve")
def rollout(run: Run, inputs: RolloutInputs) -> Rollouts:
    """Plays one shard. Another attempt finds the groups that were finished."""
    path = layout.rollouts(inputs.iteration, inputs.shard)
    return made(run, ROLLOUT, inputs, path, policy=inputs.checkpoint)


@tried_again("group {inputs.iteration:04d}")
def group(run: Run, inputs: GroupInputs) -> Groups:
    """Scores and filters."""
    return made(run, GROUP, inputs, layout.groups(inputs.iteration), policy=run.judge(inputs))


@tried_again("collate {inputs.iteration:04d}")
def collate(run: Run, inputs: CollateInputs) -> Batch:
    """Makes the batch."""
    return made(run, COLLATE, inputs, layout.batch(inputs.iteration))


@tried_again("train {inputs.checkpoint.iteration:04d}", "train")
def train(run: Run, inputs: TrainInputs) -> Checkpoint:
    """Updates the adapter."""
    return made(run, TRAIN, inputs, layout.checkpoint(inputs.checkpoint.iteration + 1))


@tried_again("evaluate {inputs.checkpoint.iteration:04d}", "serve")
def evaluate(run: Run, inputs: EvaluateInputs, path: str | None = None) -> Evaluation:
    """Plays the held-out tasks."""
    path = path or layout.evaluation(inputs.checkpoint.iteration)
    return made(run, EVALUATE, inputs, path, policy=inputs.checkpoint)


@tried_again("evaluate {inputs.model.name}", "serve")
def evaluate_model(run: Run, inputs: EvaluateModelInputs, path: str, host: Host) -> ModelEvaluation:
    """Plays the held-out tasks with another model."""
    return made(run, EVALUATE_MODEL, inputs, path, host=host)


@tried_again("promote {inputs.challenger.iteration:04d}")
def promote(run: Run, inputs: PromoteInputs) -> Champion:
    """Decides between the challenger and who was champion when it was asked for."""
    with locked(run.root / layout.CHAMPIONS):
        path = decision_path(run.root, inputs.fingerprint())
        if run.finished(PROMOTE, inputs, path) is None and incumbent(run.root) != inputs.incumbent:
            raise NightschoolError(f"checkpoint {inputs.incumbent.iteration} was rolled back meanwhile: try again")
        return made(run, PROMOTE, inputs, path)


@tried_again("report")
def report(run: Run) -> None:
    """Brings the run's report up to date, here and in the UI."""
    show_report(run.root)


@task(task_run_name="backup", cache_policy=NO_CACHE, persist_result=False)
def backup(run: Run, bucket: BucketSettings) -> None:
    """Sends what is new to the bucket. Not tried again here: each request was, and the next iteration does it."""
    send(run.root, bucket, get_run_logger().info)


@task(task_run_name="prune", cache_policy=NO_CACHE, persist_result=False)
def prune(run: Run) -> None:
    """Makes room, as the run's policy says. Not tried again: the next night does it."""
    make_room(run.root, run.plan.config.retention, backed_up(run.root), get_run_logger().info, dry_run=False)


def made(
    run: Run,
    step: Step[InputsT, ArtifactT],
    inputs: InputsT,
    path: str,
    policy: Checkpoint | None = None,
    host: Host | None = None,
) -> ArtifactT:
    """The artifact at `path`: what is there, else made now."""
    if done := run.finished(step, inputs, path):
        return reused(path, done)
    with shown(run.root.name, step.name, get_run_logger().info) as say:
        return run.make(step, inputs, path, say, policy, host(say) if host else None)


def reused(path: str, done: ArtifactT) -> ArtifactT:
    """What a task returns that found its artifact: a state, which Prefect takes as the task's own.

    Whoever asks for the task's result gets its data.
    """
    return cast(ArtifactT, Completed(name="Reused", message=f"{path} was finished before", data=done))
