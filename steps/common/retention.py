"""Which artifacts of a run may go, to make room: decided from manifests alone. Deletes nothing.

A run must go on where it is, so these stay whatever the policy says: the newest checkpoint, what an iteration that is
not trained yet has played, the champion and its predecessor, a checkpoint that is served, and where a backup is
configured all that is not in it yet.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import Field

from steps.common import layout
from steps.common.artifacts import Manifest, Record, read_manifest
from steps.common.champion import line
from steps.common.nights import newest_checkpoint
from steps.common.rewind import MOMENT, RECORD
from steps.common.runs import in_use
from steps.common.storage import files_under

BackedUp = Collection[tuple[str, str]]
"""Paths and digests of the artifacts that a backup holds."""


class Policy(Record):
    """What of a run is kept. A rule that is not set deletes nothing, and so nothing is deleted unless one is."""

    last: int | None = Field(None, ge=1)
    """Keeps so many checkpoints, the newest. A checkpoint goes where some of last, best and every are set, and none of
    them keeps it."""
    best: int | None = Field(None, ge=1)
    """Keeps so many checkpoints, those with the highest held-out reward, and all that were never evaluated."""
    every: int | None = Field(None, ge=1)
    """Keeps checkpoints 0, every, 2·every, …"""
    rollout_days: float | None = Field(None, ge=0)
    """Rollouts and batches go so many days after they were made, once they were trained on. Groups with their rewards
    stay."""
    superseded_days: float | None = Field(None, ge=0)
    """What a rewind has set aside goes after so many days."""

    def rules(self) -> str:
        """Those for checkpoints that are set, in words; empty where none is."""
        return ", ".join(f"{name} {value}" for name in ("last", "best", "every") if (value := getattr(self, name)))


class RetentionSettings(Policy):
    """What is kept in the run's folder, and in the bucket."""

    remote: Policy = Policy()
    """For `nightschool prune --remote`."""


class Verdict(Record):
    """Whether a folder goes, and why."""

    path: str
    bytes: int
    goes: bool
    reason: str


def judge(root: Path, policy: Policy, now: datetime, backed_up: BackedUp | None) -> list[Verdict]:
    """All that the policy is about, whether it goes or not. `backed_up` is None where no backup is configured.

    Raises `CorruptArtifact` for a manifest that can't be read.
    """
    return [
        *_checkpoints(root, policy, backed_up),
        *_played(root, policy, now, backed_up),
        *_set_aside(root, policy, now, backed_up),
    ]


def kept_by_rule(policy: Policy, numbers: Collection[int], rewards: Mapping[int, float]) -> dict[int, str]:
    """The checkpoints among `numbers` that a rule of the policy keeps, with the rule. Equals of the last best stay."""
    kept: dict[int, str] = {}
    if policy.every:
        kept |= {i: f"one of every {policy.every}" for i in numbers if i % policy.every == 0}
    if policy.best:
        best = sorted((rewards[i] for i in numbers if i in rewards), reverse=True)[: policy.best]
        kept |= {i: f"among the best {policy.best}" for i in numbers if i in rewards and rewards[i] >= best[-1]}
        kept |= {i: "never evaluated" for i in numbers if i not in rewards}
    if policy.last:
        kept |= dict.fromkeys(sorted(numbers)[-policy.last :], f"among the last {policy.last}")
    return kept


def needed(root: Path) -> dict[int, str]:
    """Checkpoints that stay whatever the policy says, and why. Raises `CorruptArtifact`."""
    finished = [i for i in layout.numbered(root, "checkpoints") if read_manifest(root / layout.checkpoint(i))]
    served = [i for i in layout.numbered(root, layout.DAY) if in_use(root / layout.DAY / f"{i:04d}")]
    champions = [checkpoint.iteration for checkpoint in line(root)[:2]]
    names = ("the champion", "the champion's predecessor") if champions else ("what a first champion has to beat",)
    return {
        **dict.fromkeys(served, "served at the moment"),
        **dict(reversed(list(zip(champions or [0], names, strict=False)))),
        # Where one is missing in between, training goes on from the first of the two.
        **dict.fromkeys([newest_checkpoint(root), *finished[-1:]], "the newest"),
    }


def rewards_of(checkpoints: Mapping[int, Manifest], evaluations: Mapping[int, Manifest]) -> dict[int, float]:
    """Held-out rewards by checkpoint: of those that were evaluated as they are now."""
    rewards = {}
    for i in checkpoints.keys() & evaluations.keys():
        reward = evaluations[i].artifact["reward"]
        is_of_it = evaluations[i].inputs["checkpoint"]["digest"] == checkpoints[i].digest
        if is_of_it and reward is not None and math.isfinite(reward):
            rewards[i] = float(reward)
    return rewards


def too_young(made: datetime, now: datetime, days: float) -> str | None:
    """Why it stays, where it does."""
    return None if now - made >= timedelta(days=days) else f"younger than {days:g} days"


def set_aside_at(name: str) -> datetime | None:
    """When a rewind set a folder of this name aside; None for what is none of its folders."""
    try:
        return datetime.strptime(name, MOMENT).replace(tzinfo=UTC)
    except ValueError:
        return None


def bytes_of(folder: Path, manifest: Manifest) -> int:
    """What deleting the artifact's files frees."""
    files = [folder / name for name in manifest.files]
    return sum(file.lstat().st_size for file in files if file.exists())


def is_ours(root: Path, path: str, manifest: Manifest) -> bool:
    """Are the artifact's files in the run's folder itself? A link may lead to where others have theirs."""
    folder = root.resolve() / path
    return all((folder / name).resolve() == folder / name for name in (layout.MANIFEST, *manifest.files))


def artifacts_aside(aside: Path) -> dict[str, Manifest]:
    """What a rewind has set aside, by its path in the run. Raises `CorruptArtifact`."""
    found = ((path, read_manifest(aside / path)) for path in layout.artifacts(aside))
    return {path: manifest for path, manifest in found if manifest}


def unfinished_aside(aside: Path) -> list[Path]:
    """Hidden folders there: groups of shards that were not finished, and what a killed prune has left."""
    suffixes = (layout.GROUPS, layout.PARTIAL)
    return [p for p in sorted(aside.rglob(".*")) if p.name.endswith(suffixes) and p.is_dir() and not p.is_symlink()]


def _checkpoints(root: Path, policy: Policy, backed_up: BackedUp | None) -> Iterator[Verdict]:
    found = _numbered(root, "checkpoints")
    yield from (left for i, manifest in found.items() if (left := _left_over(root, layout.checkpoint(i), manifest)))
    if policy.rules():
        whole = {i: manifest for i, manifest in found.items() if not manifest.pruned}
        kept = kept_by_rule(policy, whole, rewards_of(whole, _numbered(root, "evaluations"))) | needed(root)
        for i, manifest in whole.items():
            reason = kept.get(i) or _obstacle(root, layout.checkpoint(i), manifest, backed_up)
            yield _verdict(root, layout.checkpoint(i), manifest, reason, f"not kept by {policy.rules()}")


def _numbered(root: Path, folder: str) -> dict[int, Manifest]:
    paths = {i: root / folder / f"{i:04d}" for i in layout.numbered(root, folder)}
    return {i: manifest for i, path in paths.items() if (manifest := read_manifest(path))}


def _played(root: Path, policy: Policy, now: datetime, backed_up: BackedUp | None) -> Iterator[Verdict]:
    newest = newest_checkpoint(root)
    for i in layout.numbered(root, "iterations"):
        shards = [layout.rollouts(i, shard) for shard in layout.numbered(root, layout.shards(i))]
        for path in (*shards, layout.batch(i)):
            manifest = read_manifest(root / path)
            if manifest and (left := _left_over(root, path, manifest)):
                yield left
            elif manifest and not manifest.pruned and policy.rollout_days is not None:
                waits = "not trained on yet" if i >= newest else None
                young = too_young(manifest.started, now, policy.rollout_days)
                reason = waits or young or _obstacle(root, path, manifest, backed_up)
                yield _verdict(root, path, manifest, reason, f"older than {policy.rollout_days:g} days")


def _set_aside(root: Path, policy: Policy, now: datetime, backed_up: BackedUp | None) -> Iterator[Verdict]:
    if policy.superseded_days is None or (root / layout.SUPERSEDED).is_symlink():
        return
    for aside in sorted((root / layout.SUPERSEDED).glob("*")):
        moment = set_aside_at(aside.name)
        if moment is None or aside.is_symlink():
            continue
        artifacts, unfinished = artifacts_aside(aside), unfinished_aside(aside)
        if artifacts or unfinished:
            reason = _kept_aside(aside, artifacts, backed_up) or too_young(moment, now, policy.superseded_days)
            yield Verdict(
                path=aside.relative_to(root).as_posix(),
                bytes=sum(file.lstat().st_size for folder in unfinished for file in files_under(folder))
                + sum(bytes_of(aside / path, manifest) for path, manifest in artifacts.items()),
                goes=reason is None,
                reason=reason or f"older than {policy.superseded_days:g} days",
            )


def _kept_aside(aside: Path, artifacts: Mapping[str, Manifest], backed_up: BackedUp | None) -> str | None:
    if not (aside / RECORD).exists():
        return "its rewind was killed, and it comes back"
    for path, manifest in artifacts.items():
        names = {file.relative_to(aside / path).as_posix() for file in files_under(aside / path)}
        if names - {layout.MANIFEST, *manifest.files}:
            return f"{path} holds files that are not its own"
        if obstacle := _obstacle(aside, path, manifest, backed_up):
            return f"{path} is {obstacle}"
    return None


def _verdict(root: Path, path: str, manifest: Manifest, kept: str | None, rule: str) -> Verdict:
    return Verdict(path=path, bytes=bytes_of(root / path, manifest), goes=kept is None, reason=kept or rule)


def _left_over(root: Path, path: str, manifest: Manifest) -> Verdict | None:
    """Of an artifact whose deletion was killed."""
    size = bytes_of(root / path, manifest) if manifest.pruned and is_ours(root, path, manifest) else 0
    return _verdict(root, path, manifest, None, "was to go before") if size else None


def _obstacle(root: Path, path: str, manifest: Manifest, backed_up: BackedUp | None) -> str | None:
    if backed_up is not None and not manifest.pruned and (path, manifest.digest) not in backed_up:
        return "not backed up yet"
    return None if is_ours(root, path, manifest) else "behind a symbolic link"
