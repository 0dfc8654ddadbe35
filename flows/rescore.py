"""`nightschool rescore`: stored rollouts get the rewards that the environment gives now. Nothing is played.

The iteration asked for is grouped at once, so that one sees what changed. The rest is the next training's: it groups
later iterations anew as well, brings back what still fits, and plays on from the first checkpoint that comes out
otherwise, since what was played after it was played by checkpoints that there should not have been.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from flows.config import RunConfig, explain, merge, parse_override
from flows.plan import Plan
from flows.run import Run
from steps.common import layout
from steps.common.artifacts import Groups, Rollouts
from steps.common.errors import InvalidInputs
from steps.common.rewind import rescore
from steps.common.runs import read_record
from steps.group import GROUP


def rescore_run(root: Path, iteration: int) -> tuple[Groups, Groups]:
    """The groups of an iteration as they were, and as they are now, by the settings in `run.json`.

    Raises `RunInUse`, and `InvalidInputs` where the iteration was not grouped.
    """
    plan = Plan(recorded_config(root))
    aside, _ = rescore(root, iteration)
    with Run.open(plan, root, print) as run:
        shards = layout.numbered(root, layout.shards(iteration))
        rollouts = [run.read(Rollouts, layout.rollouts(iteration, shard)) for shard in shards]
        path = layout.groups(iteration)
        then = run.read(Groups, f"{aside.relative_to(root)}/{path}")
        inputs = plan.group(rollouts)
        return then, run.make(GROUP, inputs, path, print, policy=run.judge(inputs))


def recorded_config(root: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings that the run was last trained with, and `key.key=value` on top.

    Raises `InvalidInputs` where they are none of this version's.
    """
    config = read_record(root).config
    for override in overrides:
        merge(config, parse_override(override))
    try:
        return RunConfig.model_validate(config)
    except ValidationError as error:
        lines = "; ".join(explain(RunConfig, error))
        raise InvalidInputs(
            f"{root / layout.RUN}: {lines}: `nightschool train` with the run's settings first"
        ) from None
