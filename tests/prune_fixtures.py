"""A run's history without models, for tests of what may be deleted: every artifact is real, and a few bytes large."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from steps.common import layout
from steps.common.artifacts import (
    Artifact,
    Batch,
    Champion,
    Checkpoint,
    Evaluation,
    Manifest,
    Record,
    Rollouts,
    check_files,
    read_manifest,
)
from steps.common.nights import newest_checkpoint
from steps.common.receipts import RECEIPT, Backup, BackupInputs, Sent, next_path
from steps.common.retention import Policy, Verdict
from steps.common.step import Inputs, Step, Workspace
from steps.common.storage import write_atomically
from steps.prune import backed_up, prune

BACKUP = {"BACKUP_BUCKET": "nights"}
COUNTS = {"failed": 0, "failures": {}}
PLAYED = {"iteration": 0, "groups": 1, "trajectories": 2, "mean_reward": 0.5, **COUNTS}
TOKENS = {"sequences": 2, "prompt_tokens": 1, "completion_tokens": 1}


class InitializeInputs(Inputs):
    seed: int = 0


class RolloutInputs(Inputs):
    checkpoint: Checkpoint


class CollateInputs(Inputs):
    rollouts: list[Rollouts]


class TrainInputs(Inputs):
    checkpoint: Checkpoint
    batch: Batch


class DecisionInputs(Inputs):
    number: int


class History:
    """Makes a run's artifacts as the flow would, each once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[str] = []
        """Paths, of what was not there before."""

    def make(self, kind: type[Artifact], inputs: Inputs, path: str, **facts: Any) -> Any:
        def work(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
            self.made.append(path)
            (workspace.out / "data").mkdir()
            (workspace.out / "data" / "file").write_text(f"{path} {inputs.fingerprint()}")
            (workspace.out / "small").write_text(path)
            return facts

        return Step("any", type(inputs), kind, work).run(inputs, self.root, path)

    def start(self) -> Checkpoint:
        return self._checkpoint(0, InitializeInputs())

    def play(self, checkpoint: Checkpoint) -> Batch:
        """Rollouts and batch of the checkpoint's iteration."""
        i = checkpoint.iteration
        shards = [
            self.make(
                Rollouts,
                RolloutInputs(checkpoint=checkpoint),
                layout.rollouts(i, shard),
                shard=shard,
                **PLAYED,
                **TOKENS,
            )
            for shard in range(2)
        ]
        facts = {"iteration": i, "sequences": 2, "tokens": 2, "trained_tokens": 1, "dropped": {}}
        batch: Batch = self.make(Batch, CollateInputs(rollouts=shards), layout.batch(i), **facts)
        return batch

    def train(self, checkpoint: Checkpoint, batch: Batch) -> Checkpoint:
        return self._checkpoint(checkpoint.iteration + 1, TrainInputs(checkpoint=checkpoint, batch=batch))

    def go_on(self, last: int) -> list[Checkpoint]:
        """As the flow does: from the first checkpoint, through all that is finished, to checkpoint `last`."""
        checkpoints = [self.start()]
        for _ in range(last):
            checkpoints.append(self.train(checkpoints[-1], self.play(checkpoints[-1])))
        return checkpoints

    def evaluate(self, checkpoint: Checkpoint, reward: float | None) -> None:
        i = checkpoint.iteration
        facts = {"iteration": i, "tasks": 1, "stderr": 0.1, "metrics": {}, **COUNTS}
        self.make(Evaluation, RolloutInputs(checkpoint=checkpoint), layout.evaluation(i), reward=reward or 0.0, **facts)
        if reward is None:  # as a mean over nothing would be
            self._rewrite(
                layout.evaluation(i), artifact=self.manifest(layout.evaluation(i)).artifact | {"reward": None}
            )

    def promote(self, number: int, checkpoint: Checkpoint, predecessor: Checkpoint) -> None:
        facts = {"decision": "promoted", "reason": "", "test": None}
        self.make(
            Champion,
            DecisionInputs(number=number),
            layout.champion(number),
            checkpoint=checkpoint.model_dump(),
            predecessor=predecessor.model_dump(),
            **facts,
        )

    def back_up(self, to: str, paths: list[str]) -> None:
        """Writes a receipt, and sends nothing."""
        artifacts = {path: Sent.of(self.manifest(path)) for path in paths}

        def work(inputs: BackupInputs, workspace: Workspace) -> dict[str, Any]:
            (workspace.out / RECEIPT).write_text(inputs.model_dump_json())
            return {"to": to, "artifacts": len(artifacts), "bytes": 1}

        inputs = BackupInputs(to=to, holds=artifacts)
        Step("backup", BackupInputs, Backup, work).run(inputs, self.root, next_path(self.root))

    def age(self, path: str, days: float) -> None:
        """Has the artifact been made so many days ago."""
        self._rewrite(path, started=self.manifest(path).started - timedelta(days=days))

    def manifest(self, path: str) -> Manifest:
        manifest = read_manifest(self.root / path)
        assert manifest
        return manifest

    def is_whole(self, path: str) -> bool:
        manifest = self.manifest(path)
        if manifest.pruned:
            assert not [name for name in manifest.files if (self.root / path / name).exists()]
            return False
        check_files(self.root / path, manifest)
        return True

    def check_resumable(self) -> None:
        """Goes on two iterations further, and makes nothing on the way that was there."""
        newest = newest_checkpoint(self.root)
        before, self.made = len(self.made), []
        assert before
        self.go_on(newest + 2)
        assert not [path for path in self.made if path.startswith("checkpoints/") and int(path[-4:]) <= newest]
        assert not [path for path in self.made if path.startswith("iterations/") and int(path[11:15]) < newest]

    def _checkpoint(self, iteration: int, inputs: Inputs) -> Checkpoint:
        facts = {"base_model": "a/b", "step": iteration, "updated": True, "metrics": {}}
        made: Checkpoint = self.make(Checkpoint, inputs, layout.checkpoint(iteration), iteration=iteration, **facts)
        return made

    def _rewrite(self, path: str, **facts: Any) -> None:
        manifest = self.manifest(path).model_copy(update=facts)
        write_atomically(self.root / path / layout.MANIFEST, manifest.model_dump_json().encode())


class Everything(Record):
    """All files of a folder, by path: to compare."""

    files: dict[str, bytes]

    @classmethod
    def in_folder(cls, root: Path) -> "Everything":
        """Of `root`."""
        found = (path for path in root.rglob("*") if path.is_file() and path.name != layout.LOCK)
        return cls(files={path.relative_to(root).as_posix(): path.read_bytes() for path in found})


def silent(root: Path, policy: Policy, dry_run: bool = False) -> list[Verdict]:
    """Prunes, and says nothing."""
    return prune(root, policy, backed_up(root), lambda line: None, dry_run)


def going(verdicts: list[Verdict]) -> list[str]:
    """Paths of what goes."""
    return [verdict.path for verdict in verdicts if verdict.goes]
