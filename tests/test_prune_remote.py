"""Making room in a bucket, on a real S3 server: by the policy for it, and never what the run or the bucket needs."""

from pathlib import Path

from prune_fixtures import History

from steps.backup import backup
from steps.common.retention import Policy
from steps.remote.bucket import Bucket
from steps.remote.inventory import RemoteRun
from steps.remote.prune import prune_remote
from steps.remote.settings import BucketSettings


def test_the_bucket_has_a_policy_of_its_own(tmp_path: Path, place: BucketSettings) -> None:
    history = History(tmp_path / "night")
    root, checkpoints = history.root, history.go_on(4)
    history.promote(0, checkpoints[2], checkpoints[0])
    for path in ("iterations/0000/batch", "iterations/0001/rollouts/000"):
        history.age(path, 8)
    backup(root, place)
    policy, said = Policy(last=1, rollout_days=7), []
    before = RemoteRun(Bucket(place), "night").finished()
    expected = {
        "checkpoints/0001",
        "checkpoints/0003",
        "iterations/0000/batch",
        "iterations/0001/rollouts/000",
    }
    assert {
        verdict.path for verdict in prune_remote(root, policy, said.append, dry_run=True) if verdict.goes
    } == expected
    assert RemoteRun(Bucket(place), "night").finished() == before

    prune_remote(root, policy, said.append, dry_run=False)
    assert set(before) - set(RemoteRun(Bucket(place), "night").finished()) == expected
    assert all(history.is_whole(path) for path in expected)
    assert said[-1].startswith("4 folders were pruned")
    prune_remote(root, policy, said.append, dry_run=False)
    assert said[-1] == "nothing to prune"
    assert backup(root, place) is None  # what was deleted on purpose is not sent again
