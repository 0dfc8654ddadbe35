"""What counts as an artifact in a run's folder: verify, prune and backup mean the same."""

import shutil
from pathlib import Path

from prune_fixtures import History

from steps.common import layout
from steps.common.backups import backup_of
from steps.common.receipts import finished
from steps.common.retention import artifacts_aside
from steps.common.status import damages, pruned


def test_neither_what_is_hidden_or_set_aside_nor_a_log_is_an_artifact(tmp_path: Path) -> None:
    history = History(tmp_path / "night")
    history.go_on(1)
    made = sorted(history.made)
    whole = history.root / layout.checkpoint(1)
    for place in ("checkpoints/.0002.partial", ".cache/0002", "iterations/.old/0000/batch", "logs/day/0001"):
        shutil.copytree(whole, history.root / place)
    aside = history.root / layout.SUPERSEDED / "20300101-000000"
    for place in (layout.checkpoint(2), "iterations/0002/rollouts/.000.groups/0000"):
        shutil.copytree(whole, aside / place)
    assert list(layout.artifacts(history.root)) == made
    assert list(artifacts_aside(aside)) == [layout.checkpoint(2)]

    history.back_up("s3://bucket/night", made[:-1])
    standing = backup_of(history.root)
    assert standing and (standing.artifacts, standing.missing) == (len(made) - 1, 1)
    assert [path for path, _ in finished(history.root)] == made
    verified = [folder.relative_to(history.root).as_posix() for folder, damage in damages(history.root) if not damage]
    assert verified == ["backups/0000", *made], "a receipt is an artifact too"
    assert pruned(history.root) == []
