"""`nightschool rescore`: stored rollouts get the rewards that the environment gives now. Nothing is played.

The iteration asked for is grouped at once, so that one sees what changed. The rest is the next training's: it groups
later iterations anew as well, brings back what still fits, and plays on from the first checkpoint that comes out
otherwise, since what was played after it was played by checkpoints that there should not have been.
"""

from pathlib import Path

from flows.config import recorded_config
from flows.plan import Plan
from flows.run import Run
from steps.common import layout
from steps.common.artifacts import Groups, Rollouts
from steps.common.rewind import rescore
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
