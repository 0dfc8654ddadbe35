"""Deletes from a bucket what a policy lets go of a run, by the rules of the run's folder. Needs that folder.

Whatever the policy says, the bucket keeps the newest checkpoint that it has, and those that the run's folder may not
lose. What both have deleted is gone.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from steps.common import layout
from steps.common.artifacts import Manifest
from steps.common.retention import Policy, Verdict, kept_by_rule, needed, rewards_of, set_aside_at, too_young
from steps.prune import line_of, total_of
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteArtifact, RemoteRun
from steps.remote.settings import required


def prune_remote(root: Path, policy: Policy, say: Callable[[str], object], dry_run: bool) -> list[Verdict]:
    """Deletes what `policy` lets go, where it is no `dry_run`; tells of every folder first, and returns all verdicts.

    Call it with the run's lock. Raises `InvalidInputs` where no backup is configured, `BucketFault`, and
    `CorruptArtifact` before anything is deleted.
    """
    remote = RemoteRun(Bucket(required()), root.resolve().name)
    there = {artifact.path: artifact for artifact in remote.artifacts()}
    verdicts = list(judge_remote(root, there, policy, datetime.now(UTC)))
    for verdict in verdicts:
        say(line_of(verdict))
        if verdict.goes and not dry_run:
            remote.delete(there[verdict.path])
    say(total_of(verdicts, dry_run))
    return verdicts


def judge_remote(root: Path, there: Mapping[str, RemoteArtifact], policy: Policy, now: datetime) -> Iterator[Verdict]:
    """All that the policy is about, whether it goes or not."""
    checkpoints, evaluations = _numbered(there, "checkpoints"), _numbered(there, "evaluations")
    newest = max(checkpoints, default=0)
    if policy.rules():
        kept = kept_by_rule(policy, checkpoints, rewards_of(checkpoints, evaluations))
        kept |= needed(root) | {newest: "the newest"}
        for i in checkpoints:
            yield _verdict(there[layout.checkpoint(i)], kept.get(i), f"not kept by {policy.rules()}")
    for path, artifact in there.items():
        area, number, *part = *path.split("/"), ""
        if area == "iterations" and part[0] in ("rollouts", "batch") and policy.rollout_days is not None:
            waits = None if int(number) < newest else "not trained on yet"
            young = too_young(artifact.manifest.started, now, policy.rollout_days)
            yield _verdict(artifact, waits or young, f"older than {policy.rollout_days:g} days")
        elif area == layout.SUPERSEDED and policy.superseded_days is not None and (when := set_aside_at(number)):
            young = too_young(when, now, policy.superseded_days)
            yield _verdict(artifact, young, f"older than {policy.superseded_days:g} days")


def _numbered(there: Mapping[str, RemoteArtifact], folder: str) -> dict[int, Manifest]:
    paths = {path: path.removeprefix(f"{folder}/") for path in there}
    return {int(number): there[path].manifest for path, number in paths.items() if number.isdigit()}


def _verdict(artifact: RemoteArtifact, kept: str | None, rule: str) -> Verdict:
    return Verdict(path=artifact.path, bytes=artifact.bytes, goes=kept is None, reason=kept or rule)
