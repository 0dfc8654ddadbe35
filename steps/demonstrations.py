"""Step `demonstrations`: gathers the examples that a run starts from, into the run's own folder.

Step `sft` may run where neither a file of chats nor another run is, and both may change: what is gathered stays as it
is, and its digest is what `sft` is made from. So the flow itself runs this step, on the machine where the source is.
A rewind to it gathers anew.

The best attempts of a run are rejection sampling: of each group the attempt with the highest reward, as in RAFT
(Dong et al., 2023), where that is better than the group's worst; with `min_reward` where it is worth that much, as in
ReST (Gulcehre et al., 2023). Held-out tasks are not among them.
"""

from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

from pydantic import PositiveInt, model_validator

from environments import UnknownEnvironment
from steps.common import layout, tables
from steps.common.artifacts import Demonstrations, Record, read_manifest
from steps.common.errors import InvalidInputs
from steps.common.runs import find_run
from steps.common.settings import EnvironmentSettings
from steps.common.step import Inputs, Step, Workspace
from steps.common.storage import sha256_of
from steps.examples.best import SEQUENCES, best_attempts, check_base, digest_of_groups, grouped_iterations
from steps.examples.chats import CHATS, Chat, checked, read_chats

CHANGED = "was changed while it was read: the same command reads it anew"


class ExampleSettings(Record):
    """What is imitated. Exactly one of `demonstrations`, `chats` and `best_of`."""

    demonstrations: PositiveInt | None = None
    """So many of the environment's own; the run's seed decides which."""
    chats: Path | None = None
    """A file of JSON lines, `{"messages": […], "tools": […]}` as in OpenAI's API. Tools where the model sees any."""
    best_of: str | None = None
    """A run on the same base model, by its name or folder: the best attempt of each of its groups, token by token."""
    min_reward: float | None = None
    """With `best_of`: an attempt must be worth so much. Without it: more than the worst of its group."""

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if sum(source is not None for source in (self.demonstrations, self.chats, self.best_of)) != 1:
            raise ValueError("give one of sft.demonstrations, sft.chats and sft.best_of")
        if self.min_reward is not None and self.best_of is None:
            raise ValueError("sft.min_reward goes with sft.best_of")
        return self


class FromEnvironment(Record):
    """An environment's own demonstrations."""

    environment: EnvironmentSettings
    count: int
    seed: int


class FromChats(Record):
    """A file of chats, wherever it is."""

    sha256: str


class FromRun(Record):
    """A run's groups, as far as they went when they were gathered."""

    run: str
    iterations: int
    groups: str
    """Digest of all that was read."""
    min_reward: float | None
    base_model: str
    base_digest: str | None


Source = FromEnvironment | FromChats | FromRun


class DemonstrationsInputs(Inputs):
    """Where the examples come from."""

    operational: ClassVar[frozenset[str]] = frozenset({"where"})
    source: Source
    where: Path | None = None
    """The file, or the run's folder."""


def demonstrations_of(
    settings: ExampleSettings, root: Path, environment: EnvironmentSettings, seed: int, base: tuple[str, str | None]
) -> DemonstrationsInputs:
    """Inputs for the run at `root` on the base model `base`, by its name and the digest of its contents.

    Raises `InvalidInputs` where there is no such file or run, or one without groups.
    """
    there = read_manifest(root / layout.DEMONSTRATIONS)
    gathered = DemonstrationsInputs.model_validate(there.inputs).source if there else None
    if settings.chats:
        return _from_chats(settings.chats.expanduser().absolute(), gathered)
    if settings.best_of:
        return _from_run(settings.best_of, settings.min_reward, base, gathered)
    assert settings.demonstrations
    source = FromEnvironment(environment=environment, count=settings.demonstrations, seed=seed)
    return DemonstrationsInputs(source=source)


def _from_chats(file: Path, gathered: Source | None) -> DemonstrationsInputs:
    """Where the file is gone, what was gathered from it is still right."""
    if isinstance(gathered, FromChats) and not file.exists():
        return DemonstrationsInputs(source=gathered, where=file)
    try:
        return DemonstrationsInputs(source=FromChats(sha256=sha256_of(file)), where=file)
    except OSError as error:
        raise InvalidInputs(f"can't read the chats in {file}: {error.strerror}") from None


def _from_run(
    name: str, min_reward: float | None, base: tuple[str, str | None], gathered: Source | None
) -> DemonstrationsInputs:
    """Where the run has grown since, or is gone, what was gathered from it is still right."""
    given: dict[str, Any] = {"min_reward": min_reward, "base_model": base[0], "base_digest": base[1]}
    if isinstance(gathered, FromRun) and gathered.run == Path(name).name:
        return DemonstrationsInputs(source=gathered.model_copy(update=given))
    folder = find_run(name)
    iterations = grouped_iterations(folder)
    groups = digest_of_groups(folder, iterations)
    source = FromRun(run=folder.name, iterations=iterations, groups=groups, **given)
    return DemonstrationsInputs(source=source, where=folder)


def demonstrations(inputs: DemonstrationsInputs, workspace: Workspace) -> dict[str, Any]:
    """Gathers examples to imitate, checks them, and counts what is left out."""
    source = inputs.source
    if isinstance(source, FromEnvironment):
        return {"source": "environment", **_write_chats(_of_environment(source), workspace.out)}
    assert inputs.where
    if isinstance(source, FromChats):
        chats = read_chats(inputs.where)
        if sha256_of(inputs.where) != source.sha256:
            raise InvalidInputs(f"sft.chats: {inputs.where} {CHANGED}")
        return {"source": "chats", **_write_chats(chats, workspace.out)}
    return {"source": "best_of", **_write_best(source, inputs.where, workspace.out)}


def _of_environment(source: FromEnvironment) -> list[Chat]:
    try:
        environment = source.environment.load()
        given = list(islice(environment.demonstrations(Random(source.seed)), source.count))
        tools = list(environment.demonstrated_tools()) or None
    except UnknownEnvironment as error:  # it is here that a package turns out to be missing
        raise InvalidInputs(str(error)) from None
    except NotImplementedError:
        raise InvalidInputs(f"sft.demonstrations: the environment {source.environment.name} has none") from None
    if len(given) < source.count:
        raise InvalidInputs(f"sft.demonstrations = {source.count}, but the environment gives {len(given)}")
    chats = [{"messages": messages, "tools": tools} for messages in given]
    return checked((f"demonstration {i}", chat) for i, chat in enumerate(chats))


def _write_chats(chats: list[Chat], out: Path) -> dict[str, Any]:
    if not chats:
        raise InvalidInputs("sft.chats: the file is empty")
    (out / CHATS).write_text("".join(chat.line() for chat in chats), encoding="utf-8")
    return {"examples": len(chats), "dropped": {}}


def _write_best(source: FromRun, folder: Path, out: Path) -> dict[str, Any]:
    check_base(folder, source.base_model, source.base_digest)
    best, dropped = best_attempts(folder, source.iterations, source.min_reward)
    if digest_of_groups(folder, source.iterations) != source.groups:
        raise InvalidInputs(f"sft.best_of: {folder} {CHANGED}")
    if best.is_empty():
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise InvalidInputs(f"sft.best_of: no group of {folder} has an attempt to imitate: {why}")
    tables.write(best, out / SEQUENCES)
    return {"examples": best.n_unique(["iteration", "task_id"]), "dropped": dropped}


DEMONSTRATIONS = Step("demonstrations", DemonstrationsInputs, Demonstrations, demonstrations)

if __name__ == "__main__":
    DEMONSTRATIONS.main()
