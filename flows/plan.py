"""From a run's settings to the inputs of each step: pure, and the only place that decides who plays what.

A step gets its own inputs and no more, so that a setting which does not concern it leaves what it made valid.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from environments import Environment, Split, Task, UnknownEnvironment
from flows.config import RunConfig, StartSettings
from steps.collate import CollateInputs
from steps.common import layout
from steps.common.artifacts import (
    BaseModelFiles,
    Batch,
    Checkpoint,
    Demonstrations,
    Evaluation,
    Groups,
    OtherModel,
    Rollouts,
)
from steps.common.errors import InvalidInputs
from steps.common.models import digest_of_model, find_model
from steps.common.origin import Origin
from steps.common.step import Inputs
from steps.demonstrations import DemonstrationsInputs, demonstrations_of
from steps.evaluate import EvaluateInputs
from steps.evaluate_model import EvaluateModelInputs, ModelServer
from steps.group import GroupInputs
from steps.initialize import InitializeInputs
from steps.pretrain import PretrainInputs
from steps.promote import PromoteInputs
from steps.rollout import RolloutInputs
from steps.sft import SftInputs
from steps.train import TrainInputs


class Plan:
    """What a run's steps are asked for."""

    def __init__(self, config: RunConfig, first: int = 0) -> None:
        """From checkpoint `first` to `config.iterations`.

        Raises `InvalidInputs`: no such environment or model, or an environment too small for the settings.
        """
        self.config, self.first = config, first
        self.base = None if config.model.base is None else find_model(Path(), config.model.base)
        """A hub id or an absolute folder; None where the run makes its own base model."""
        environment = config.environment.load()
        self._train = at_least(
            config.rollout.groups if config.model.is_given else 0, "rollout.groups", environment, "train"
        )
        self._test = at_least(config.evaluate.tasks, "evaluate.tasks", environment, "test")

    @cached_property
    def base_folder(self) -> Path | None:
        """The base model's folder, where it lies in one that is not the run's."""
        return Path(self.base) if self.base and Path(self.base).is_absolute() else None

    @cached_property
    def base_digest(self) -> str | None:
        """Of what is in `base_folder`."""
        return digest_of_model(self.base_folder) if self.base_folder else None

    def pretrain(self) -> PretrainInputs:
        """Only where the run makes its own base model."""
        settings = self.config.model.pretrain
        assert settings is not None
        return PretrainInputs(environment=self.config.environment, settings=settings, seed=self.config.seed)

    def initialize(self, made: BaseModelFiles | None, origin: Origin | None = None) -> InitializeInputs:
        """For the base model that the run made, or else the one that the settings name.

        Raises `InvalidInputs` where a fork's settings don't fit its origin.
        """
        config, base = self.config, made.path if made else layout.BASE if self.base_folder else self.base
        digest = made.digest if made else self.base_digest
        if origin:
            origin.check(base, digest, config.lora)
        assert base is not None
        return InitializeInputs(
            base_model=base,
            base_digest=digest,
            origin=origin,
            dtype=config.model.dtype,
            lora=config.lora,
            seed=config.seed,
        )

    def demonstrations(self, first: InitializeInputs, root: Path) -> DemonstrationsInputs | None:
        """The examples that the run at `root` starts from; `first` is what it would start from without.

        None where the settings name none, or those that a fork's origin has learnt from already. Raises
        `InvalidInputs` where their source is not there.
        """
        config, learnt = self.config, first.origin and first.origin.sft
        if config.sft is None or (learnt and config.sft == StartSettings.model_validate(learnt)):
            return None
        base = (first.base_model, first.base_digest)
        return demonstrations_of(config.sft.examples, root, config.environment, config.seed, base)

    def sft(self, first: InitializeInputs, demonstrations: Demonstrations) -> SftInputs:
        """What the run would start from without examples, and those."""
        assert self.config.sft
        given = {name: getattr(first, name) for name in InitializeInputs.model_fields}
        return SftInputs(**given, demonstrations=demonstrations, settings=self.config.sft.training)

    def shards(self, checkpoint: Checkpoint) -> list[RolloutInputs]:
        """The iteration's tasks, dealt into shards of whole groups."""
        rollout, size = self.config.rollout, self.config.rollout.groups_per_shard
        tasks = tasks_of(checkpoint.iteration, self._train, rollout.groups, self.config.seed)
        return [
            RolloutInputs(
                checkpoint=checkpoint,
                iteration=checkpoint.iteration,
                shard=shard,
                tasks=tasks[first : first + size],
                group_size=rollout.group_size,
                environment=self.config.environment,
                sampling=self.config.sampling,
                seed=self.config.seed,
                max_failed_fraction=rollout.max_failed_fraction,
                limits=rollout.limits,
            )
            for shard, first in enumerate(range(0, len(tasks), size))
        ]

    def group(self, rollouts: Sequence[Rollouts]) -> GroupInputs:
        """All of an iteration's shards."""
        return GroupInputs(
            iteration=rollouts[0].iteration,
            rollouts=list(rollouts),
            environment=self.config.environment,
            settings=self.config.group,
        )

    def collate(self, groups: Groups, rollouts: Sequence[Rollouts]) -> CollateInputs:
        """An iteration's groups, with the rollouts that hold their tokens."""
        return CollateInputs(
            iteration=groups.iteration, groups=groups, rollouts=list(rollouts), settings=self.config.collate
        )

    def train(self, checkpoint: Checkpoint, batch: Batch) -> TrainInputs:
        """The policy that played, and what it is to learn from."""
        return TrainInputs(
            checkpoint=checkpoint,
            batch=batch,
            settings=self.config.train,
            temperature=self.config.sampling.temperature,
            dtype=self.config.model.dtype,
            seed=self.config.seed,
        )

    def evaluation_is_due(self, iteration: int) -> bool:
        """Of the checkpoint that starts `iteration`; that of a later `first` was due to those who made it."""
        if iteration == self.first > 0:
            return False
        return iteration % self.config.evaluate.every == 0 or iteration == self.config.iterations

    def played_by(self, checkpoint: Checkpoint) -> dict[str, Inputs]:
        """All that a checkpoint has to play: by path, what it is made from."""
        i = checkpoint.iteration
        shards = [] if i == self.config.iterations else self.shards(checkpoint)
        evaluations = {layout.evaluation(i): self.evaluate(checkpoint)} if self.evaluation_is_due(i) else {}
        return {**evaluations, **{layout.rollouts(i, inputs.shard): inputs for inputs in shards}}

    def evaluate(self, checkpoint: Checkpoint) -> EvaluateInputs:
        """The held-out tasks: the same for every checkpoint, with the same seeds."""
        return EvaluateInputs(checkpoint=checkpoint, **self._held_out())

    def evaluate_model(self, model: OtherModel, server: ModelServer | None) -> EvaluateModelInputs:
        """The same for another model; `server` is None for one that the flow has served."""
        return EvaluateModelInputs(model=model, server=server, **self._held_out())

    def _held_out(self) -> dict[str, Any]:
        return {
            "tasks": self._test,
            "environment": self.config.environment,
            "sampling": self.config.sampling,
            "seed": self.config.seed,
            "max_failed_fraction": self.config.evaluate.max_failed_fraction,
            "limits": self.config.rollout.limits,
        }

    def promote(
        self, challenger: Checkpoint, incumbent: Checkpoint, challenger_played: Evaluation, incumbent_played: Evaluation
    ) -> PromoteInputs:
        """Two checkpoints, and what each has played of the same tasks."""
        return PromoteInputs(
            challenger=challenger,
            incumbent=incumbent,
            challenger_played=challenger_played,
            incumbent_played=incumbent_played,
            settings=self.config.promotion,
        )


def at_least(wanted: int, key: str, environment: Environment, split: Split) -> list[Task]:
    """A split's tasks; of the test split the first `wanted`. Raises `InvalidInputs` where there are fewer, or none."""
    try:
        tasks = list(environment.tasks(split))
    except UnknownEnvironment as error:
        raise InvalidInputs(str(error)) from None
    if len(tasks) < wanted:
        raise InvalidInputs(f"{key} = {wanted}, but the {split} split of the environment has {len(tasks)} tasks")
    return tasks[:wanted] if split == "test" else tasks


def tasks_of(iteration: int, tasks: Sequence[Task], groups: int, seed: int) -> list[Task]:
    """The tasks of an iteration: no task twice, and none again before all had their turn.

    Each epoch is a permutation of its own, cut into iterations; what is too little for another iteration waits for the
    next epoch.
    """
    epoch, turn = divmod(iteration, len(tasks) // groups)
    order = Random(f"tasks|{seed}|{epoch}").sample(range(len(tasks)), len(tasks))
    return [tasks[i] for i in order[turn * groups : (turn + 1) * groups]]
