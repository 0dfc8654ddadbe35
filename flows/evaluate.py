"""Plays held-out tasks with any model, whenever one wants to know: a checkpoint, the base model, one of another maker.

    prefect deployment run evaluate/on-demand --param run=demo --param model=gpt-4.1-mini

The settings are those in `run.json`, the tasks and seeds those of training's own evaluations: the results compare, and
an evaluation that is there already is not made again. A trained run's record stays as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import NonNegativeInt

from flows import tasks
from flows.config import recorded_config
from flows.contest import Base, Contest, Foreign, Guest, Own
from flows.plan import Plan
from flows.run import Host, Run
from flows.serve import visiting
from flows.train import made_base, report_if_new
from steps.common import layout
from steps.common.artifacts import Checkpoint, Evaluation, ModelEvaluation, OtherModel
from steps.common.evaluations import BASE
from steps.common.origin import origin_of
from steps.evaluate import EVALUATE, EvaluateInputs
from steps.evaluate_model import ModelServer


def run_name() -> str:
    """The flow run's name: the run's or the environment's, and who plays where that is asked for."""
    asked = flow_run.get_parameters()
    name = Path(asked["run"]).name if asked["run"] else Path(asked["env"]).name.removesuffix(".toml")
    player = asked["model"] or (None if asked["iteration"] is None else f"{asked['iteration']:04d}")
    return f"{name} {player}" if player else name


@flow(name="evaluate", flow_run_name=run_name, persist_result=False)
def evaluate(
    run: str | None = None,
    iteration: NonNegativeInt | None = None,
    model: str | None = None,
    env: str | None = None,
    server: ModelServer | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation | ModelEvaluation:
    """Plays held-out tasks with one model, and returns how it did.

    Raises `RunInUse` where the run is trained at the moment.

    Args:
        run: The run's name.
        iteration: The checkpoint's number. Without it, and without a model, the newest that is finished.
        model: In place of a checkpoint: base, RUN@7 for a checkpoint of another run, or a model's name at a server.
        env: In place of a run: an environment's name, or a TOML file with the settings of a run.
        server: Where the model is asked; without it OpenAI's. The key is in an environment variable.
        overrides: Settings on top, like evaluate.tasks=64.
    """
    contest = Contest.of(run, env, iteration, model, server, overrides)
    with Run.open(Plan(contest.config), contest.root, get_run_logger().info) as opened:
        if contest.is_new:
            opened.record()
        evaluation = play(opened, contest)
        report_if_new(opened)
        return evaluation


def play(run: Run, contest: Contest) -> Evaluation | ModelEvaluation:
    """The evaluation that is asked for, made where it is not there."""
    if isinstance(contest.player, Own):
        checkpoint = run.read(Checkpoint, layout.checkpoint(contest.player.iteration))
        inputs = run.plan.evaluate(checkpoint)
        return played(run, inputs, own_path(run.root, inputs))
    with hosted(run, contest.player) as (model, server, host):
        asked = run.plan.evaluate_model(model, server)
        path = layout.model_evaluation(model.name, asked.fingerprint())
        return tasks.evaluate_model.submit(run, asked, path, host).result()


@contextmanager
def hosted(run: Run, player: Base | Guest | Foreign) -> Iterator[tuple[OtherModel, ModelServer | None, Host]]:
    """Who plays, at which server, and how it is had up where that is ours."""
    match player:
        case Foreign():
            yield OtherModel(name=player.name), player.server, lambda say: {}
        case Guest():
            with visiting(player.root, player.checkpoint) as host:
                yield OtherModel(name=player.name, digest=player.checkpoint.digest), None, host
        case Base():
            origin = origin_of(run.root)
            basis = run.plan.initialize(made_base(run, origin), origin)
            model = OtherModel(name=BASE, digest=basis.base_digest)
            yield model, None, lambda say: run.serve_base(basis.base_model, say)


def own_path(root: Path, inputs: EvaluateInputs) -> str:
    """The usual place, or another where these are not the settings that the run's own evaluations have."""
    usual = layout.evaluation(inputs.checkpoint.iteration)
    if inputs.fingerprint() == Plan(recorded_config(root)).evaluate(inputs.checkpoint).fingerprint():
        return usual
    return layout.evaluation_anew(inputs.checkpoint.iteration, inputs.fingerprint())


def played(run: Run, inputs: EvaluateInputs, path: str) -> Evaluation:
    """The evaluation at `path`, with the model server up for its checkpoint where it is still to be made."""
    if run.finished(EVALUATE, inputs, path) is None:
        tasks.serve.submit(run, inputs.checkpoint).result()
    return tasks.evaluate.submit(run, inputs, path).result()
