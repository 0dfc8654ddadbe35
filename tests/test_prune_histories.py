"""Whatever has happened to a run before, what is pruned of it leaves it all that it needs."""

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from prune_fixtures import BACKUP, Everything, History, going, silent

from steps.common import layout
from steps.common.nights import newest_checkpoint
from steps.common.retention import Policy, needed
from steps.common.runs import locked
from steps.common.status import pruned
from steps.prune import backed_up

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder that has no disk to wait for."""
NUMBER = st.none() | st.integers(1, 4)
DAYS = st.none() | st.sampled_from([0.0, 3.0, 30.0])
POLICIES = st.builds(Policy, last=NUMBER, best=NUMBER, every=NUMBER, rollout_days=DAYS, superseded_days=DAYS)
REWARDS = st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_happened_a_run_keeps_what_it_needs(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        history, rewards = some_history(data, Path(folder) / "run")
        root = history.root
        is_configured = data.draw(st.booleans(), label="backup")
        with patch.dict(os.environ, BACKUP if is_configured else {}):
            check_pruned_twice(history, rewards, data.draw(st.tuples(POLICIES, POLICIES), label="policies"))
        with locked(root):
            history.check_resumable()


def some_history(data: st.DataObject, root: Path) -> tuple[History, dict[int, float]]:
    history = History(root)
    checkpoints = history.go_on(data.draw(st.integers(0, 6), label="checkpoints"))
    if data.draw(st.booleans(), label="played"):
        history.play(checkpoints[-1])
    rewards = {}
    for checkpoint in checkpoints:
        if data.draw(st.booleans(), label="evaluated"):
            reward = data.draw(REWARDS, label="reward")
            history.evaluate(checkpoint, reward)
            rewards |= {checkpoint.iteration: reward} if reward is not None else {}
    line = [checkpoints[0]]
    for number, champion in enumerate(data.draw(st.lists(st.sampled_from(checkpoints), max_size=3), label="champions")):
        history.promote(number, champion, line[0])
        line.insert(0, champion)
    paths = sorted(path.parent.relative_to(root).as_posix() for path in root.rglob(layout.MANIFEST))
    for path in paths:
        history.age(path, data.draw(st.sampled_from([0, 5, 50]), label="age"))
    for sent in data.draw(st.lists(st.sets(st.sampled_from(paths)), max_size=2), label="receipts"):
        history.back_up("s3://nights/run", sorted(sent))
    return history, rewards


def check_pruned_twice(history: History, rewards: dict[int, float], policies: tuple[Policy, Policy]) -> None:
    root, whole = history.root, set(range(newest_checkpoint(history.root) + 1))
    newest, kept, sent = newest_checkpoint(root), needed(root), backed_up(root)
    for policy in policies:
        best = sorted((rewards[i] for i in whole & rewards.keys()), reverse=True)[: policy.best or 0]
        silent(root, policy)
        now = {i for i in whole if history.is_whole(layout.checkpoint(i))}
        gone = whole - now
        assert newest_checkpoint(root) == newest
        assert not gone & kept.keys()
        assert newest in kept and newest not in gone
        assert not gone or policy.rules()
        assert not [i for i in gone if policy.best and (i not in rewards or rewards[i] >= best[-1])]
        assert not gone & set(sorted(whole)[-policy.last :] if policy.last else [])
        assert not [i for i in gone if policy.every and i % policy.every == 0]
        if sent is not None:
            assert all((path, history.manifest(path).digest) in sent for path in pruned(root))
        assert not [path for path in pruned(root) if path.startswith(f"iterations/{newest:04d}")]
        after = Everything.in_folder(root)
        assert going(silent(root, policy)) == []
        assert Everything.in_folder(root) == after
        whole = now
