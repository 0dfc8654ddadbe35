"""A run's settings: the steps' own, composed. Written by hand in TOML, refused where a key is unknown.

    config = RunConfig.from_toml(Path("configs/demo.toml"), ["train.learning_rate=1e-3"])

A setting that changes a result takes part in the fingerprint of the steps that it changes, and of no others: raising
`iterations` keeps what is done.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from flows.runtimes import RuntimeSettings
from flows.runtimes.process import ProcessSettings
from steps.agent.limits import RolloutLimits
from steps.collate import CollateSettings
from steps.common import layout
from steps.common.artifacts import Record
from steps.common.backups import BackupSettings
from steps.common.errors import InvalidInputs
from steps.common.retention import RetentionSettings
from steps.common.runs import NAME, read_record
from steps.common.settings import Dtype, EnvironmentSettings, LoraSettings, SamplingSettings
from steps.demonstrations import ExampleSettings
from steps.group import GroupSettings
from steps.pretrain import PretrainSettings
from steps.promote import PromotionSettings
from steps.serving.settings import ServeSettings
from steps.sft import SftSettings
from steps.train import TrainSettings

Seconds = Annotated[float, Field(gt=0, description="Seconds for one attempt.")]


class ModelSettings(Record):
    """The model to start from: one that exists, or one that the run makes. A run without one is not trained."""

    base: str | None = None
    """A hub id, or a folder with a model in transformers' format."""
    pretrain: PretrainSettings | None = None
    """Makes a tiny model from the environment's demonstrations, for machines without a hub."""
    dtype: Dtype = "float32"
    """Of the base model's weights, in training and in serving."""

    @property
    def is_given(self) -> bool:
        """Is there one?"""
        return self.base is not None or self.pretrain is not None

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.base is not None and self.pretrain is not None:
            raise ValueError("give either model.base or a table [model.pretrain], not both")
        return self


class StartSettings(ExampleSettings, SftSettings):
    """Examples to imitate before the first iteration, and how."""

    @property
    def examples(self) -> ExampleSettings:
        """What is imitated."""
        return ExampleSettings.model_validate(self.model_dump(include=set(ExampleSettings.model_fields)))

    @property
    def training(self) -> SftSettings:
        """How."""
        return SftSettings.model_validate(self.model_dump(include=set(SftSettings.model_fields)))


class RolloutSettings(Record):
    """How much an iteration plays."""

    groups: int = Field(32, ge=1)
    """Tasks an iteration."""
    group_size: int = Field(8, ge=2)
    """Attempts at each task, which are compared with one another."""
    groups_per_shard: int = Field(8, ge=1)
    """A shard is one process and one retry: fewer groups, more processes."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """A shard stops the run where a larger share of its attempts fails."""
    limits: RolloutLimits = RolloutLimits()


class EvaluateSettings(Record):
    """Held-out tasks, played by checkpoints."""

    tasks: int = Field(256, ge=1)
    """The first so many of the environment's test split."""
    every: int = Field(5, ge=1)
    """Evaluates checkpoints 0, every, 2·every, … and the last one."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """An evaluation stops the run where a larger share of its attempts fails."""


class Timeouts(Record):
    """Seconds that one attempt at a step may take before it is killed."""

    pretrain: Seconds = 4 * 3600
    initialize: Seconds = 1800
    sft: Seconds = 12 * 3600
    rollout: Seconds = 4 * 3600
    group: Seconds = 2 * 3600
    collate: Seconds = 3600
    train: Seconds = 6 * 3600
    evaluate: Seconds = 4 * 3600
    evaluate_model: Seconds = 4 * 3600
    promote: Seconds = 600


class RunConfig(Record):
    """Everything that a run is made from."""

    name: Annotated[str, Field(pattern=NAME)]
    """The run's folder under the runs folder, and its identity: the same name goes on where it stopped."""
    seed: int = 0
    """Decides the order of tasks, the sampling, the shuffles and the adapter's first weights."""
    iterations: int = Field(ge=1)
    """Updates in all. May be raised later."""
    stop_after_idle: int = Field(3, ge=1)
    """Stops the run after so many iterations in a row in which no group had anything to learn from."""
    environment: EnvironmentSettings
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    sft: StartSettings | None = None
    """With it the run starts from examples: checkpoint 0 has learnt to imitate them."""
    sampling: SamplingSettings = SamplingSettings()
    rollout: RolloutSettings = RolloutSettings()
    group: GroupSettings = GroupSettings()
    collate: CollateSettings = CollateSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    promotion: PromotionSettings = PromotionSettings()
    backup: BackupSettings = BackupSettings()
    retention: RetentionSettings = RetentionSettings()
    serve: ServeSettings = ServeSettings()
    runtime: Annotated[RuntimeSettings, Field(discriminator="type")] = ProcessSettings()
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _judge_within_reach(self) -> Self:
        if self.group.judge and self.runtime.type == "docker":
            raise ValueError(
                "group.judge needs the network, and runtime.type = 'docker' gives none to steps that play nothing: "
                "take 'process' or 'pool'"
            )
        return self

    @classmethod
    def from_toml(cls, file: Path, overrides: Sequence[str] = ()) -> Self:
        """Reads a file, with `key.key=value` on top. Raises `InvalidInputs`: a line for each thing that is wrong."""
        try:
            given = tomllib.loads(file.read_text())
        except OSError as error:
            raise InvalidInputs(f"can't read {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInputs(f"{file} is not TOML: {error}") from None
        return cls.from_table(given, overrides, str(file))

    @classmethod
    def from_table(cls, given: dict[str, Any], overrides: Sequence[str], source: str) -> Self:
        """As `from_toml`, for what stands in a file, or might."""
        for override in overrides:
            merge(given, parse_override(override))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InvalidInputs("\n".join(f"{source}: {line}" for line in explain(cls, error))) from None

    def to_train(self) -> Self:
        """Itself. Raises `InvalidInputs` where there is no model to train."""
        if self.model.is_given:
            return self
        raise InvalidInputs(f"{self.name} has no model to train: give either model.base or a table [model.pretrain]")


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


def parse_override(text: str) -> dict[str, Any]:
    """`train.learning_rate=1e-3` as a nested table. The value is TOML; what is no TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidInputs(f"--set {text}: write it as key=value, like train.learning_rate=1e-3")
    try:
        return tomllib.loads(f"{key} = {value}")
    except tomllib.TOMLDecodeError:
        pass  # demo rather than "demo": shells eat the quotes
    try:
        return tomllib.loads(f"{key} = '''{value}'''")
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputs(f"--set {text}: {error}") from None


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Puts `other` on top, table by table."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def explain(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """A line for each error: the key, the value, what is wrong, and the nearest valid key where one is unknown."""
    for item in error.errors():
        path, known = resolve(model, [str(part) for part in item["loc"]])
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path[-1], known, n=1)
            hint = f"did you mean {'.'.join([*path[:-1], *near])}?" if near else f"there are {', '.join(known)}"
            yield f"unknown key {key}; {hint}"
        elif item["type"] == "missing":
            yield f"{key} is missing"
        elif item["type"] == "value_error":  # a check over several keys: its message says which
            yield f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
        else:
            message = re.sub(r"^Input should", "should", item["msg"])
            yield f"{key} = {item['input']!r}: {message}"


def resolve(model: type[BaseModel] | None, location: Sequence[str]) -> tuple[list[str], list[str]]:
    """The keys that pydantic's location of an error stands for, and those known where the last of them stands.

    They differ where a table's `type` chooses a model: the location names the type, the file has no such key.
    """
    path: list[str] = []
    known: list[str] = []
    while location:
        known = sorted(model.model_fields) if model else []
        key, *location = location
        path.append(key)
        members = list(models_in(model.model_fields[key].annotation)) if model and key in known else []
        if len(members) > 1 and location:
            kind, *location = location
            members = [m for m in members if kind in get_args(m.model_fields["type"].annotation)]
        model = members[0] if members else None
    return path, known


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models that a field's type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
