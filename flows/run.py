"""An open run: its folder, held by this process alone; the runtime that its steps run in; the model server.

with Run.open(plan, folder) as run:
    run.make(GROUP, inputs, layout.groups(0), say)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

from flows.plan import Plan
from flows.runtimes import make_runtime
from flows.runtimes.base import Runtime, Say
from flows.serving import ModelServer, environment_of
from steps.agent.shard import sweep_groups
from steps.common import layout
from steps.common.artifacts import Checkpoint, read_artifact, read_manifest
from steps.common.models import link_base
from steps.common.rewind import bring_back
from steps.common.runs import RunRecord, locked, write_record
from steps.common.step import ArtifactT, Inputs, InputsT, Step, clear, package_versions, sweep_partials
from steps.group import GroupInputs
from steps.remote.settings import BucketSettings

Host = Callable[[Say], Mapping[str, str]]
"""Has a model served, and returns the environment variables that say where."""


class Run:
    """What the tasks of a flow share. Made by `open`."""

    def __init__(self, root: Path, plan: Plan, runtime: Runtime, server: ModelServer) -> None:
        self.root, self.plan = root, plan
        self.news = False
        """Was any artifact made, and not found? Whoever has told of it sets it back."""
        self.bucket = BucketSettings.from_environment()
        """Where backups go; None where there are none."""
        self.unsaved = True
        """May something be missing there? Whoever has tried to send it sets it back."""
        self._runtime, self._server = runtime, server

    @classmethod
    @contextmanager
    def open(cls, plan: Plan, root: Path, say: Say) -> Iterator[Self]:
        """Takes the run's lock, and clears what killed steps left half-done.

        Raises `RunInUse`. In the end whatever was started is ended.
        """
        with locked(root):
            runtime = make_runtime(plan.config.runtime, root)
            for left in (*sweep_partials(root, spare=runtime.at_work), *sweep_groups(root)):
                say(f"removed {left.relative_to(root)}, which a step was killed in")
            if plan.base_folder and plan.base_digest:
                link_base(root, plan.base_folder, plan.base_digest)
            server = ModelServer(runtime, plan.config)
            with closing(server), closing(runtime):  # the steps first: they would miss the server
                yield cls(root, plan, runtime, server)

    def record(self) -> None:
        """Writes `run.json`: what the run is asked for from now on."""
        config = self.plan.config.model_dump(mode="json")
        write_record(self.root, RunRecord(config=config, versions=package_versions()))

    def read(self, kind: type[ArtifactT], path: str) -> ArtifactT:
        """An artifact that is finished, as it is: whatever its settings were. Raises `CorruptArtifact`."""
        return read_artifact(kind, self.root, path)

    def is_pruned(self, checkpoint: Checkpoint) -> bool:
        """Were its files deleted to make room?"""
        manifest = read_manifest(self.root / checkpoint.path)
        return manifest is not None and manifest.pruned is not None

    def is_unplayed(self, checkpoint: Checkpoint) -> bool:
        """Is its evaluation, or a shard of its iteration, still to be played?"""
        played = self.plan.played_by(checkpoint)
        return not all(self._is_there(path, inputs) for path, inputs in played.items())

    def finished(self, step: Step[InputsT, ArtifactT], inputs: InputsT, path: str) -> ArtifactT | None:
        """The artifact at `path` where it is finished, or was set aside by a rewind and still fits.

        Raises `InvalidInputs` where it was made from other inputs, `CorruptArtifact` where it is damaged.
        """
        return step.finished(inputs, self.root, path) if self._is_there(path, inputs) else None

    def _is_there(self, path: str, inputs: Inputs) -> bool:
        return read_manifest(self.root / path) is not None or bring_back(self.root, path, inputs.fingerprint())

    def make(
        self,
        step: Step[InputsT, ArtifactT],
        inputs: InputsT,
        path: str,
        say: Say,
        policy: Checkpoint | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ArtifactT:
        """The artifact at `path`, made now; with the model server up for `policy` where one is needed.

        Where another model plays, `env` says where that is served.
        """
        env = self.serve(policy, say) if policy else env or {}
        if step.name == "train":
            self._server.rest(say)
        timeout = getattr(self.plan.config.timeouts, step.name)
        try:
            artifact = self._runtime.run(step, inputs, path, env=env, timeout=timeout, say=say)
        finally:
            clear(self.root / path)
        self.news = self.unsaved = True
        return artifact

    def make_here(self, step: Step[InputsT, ArtifactT], inputs: InputsT, path: str) -> ArtifactT:
        """The artifact at `path`, made now in this process, from what other machines and containers may not see."""
        artifact = step.run(inputs, self.root, path)
        self.news = self.unsaved = True
        return artifact

    def judge(self, inputs: GroupInputs) -> Checkpoint | None:
        """The checkpoint to be served while groups are scored: the one that played, where its base model judges."""
        settings = inputs.settings.judge
        return self.read(Checkpoint, layout.checkpoint(inputs.iteration)) if settings and settings.is_own else None

    def serve(self, checkpoint: Checkpoint, say: Say) -> dict[str, str]:
        """Has the model server up for `checkpoint`; returns the environment variables that say where."""
        return environment_of(self._server.ensure(checkpoint, say))

    def serve_base(self, base_model: str, say: Say) -> dict[str, str]:
        """The same for the base model, in a flow that serves no checkpoint."""
        return environment_of(self._server.ensure_base(base_model, say))
