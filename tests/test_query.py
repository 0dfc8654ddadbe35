"""SQL over a run's finished tables."""

from pathlib import Path

import pytest
from run_fixtures import group_of, store_rollouts

from steps.common import layout, tables
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.query import select


def test_views_span_iterations_and_shards(tmp_path: Path) -> None:
    store_rollouts(tmp_path, [group_of("a", [1.0, 0.0])], iteration=0, shard=0)
    store_rollouts(tmp_path, [group_of("b", [1.0, None])], iteration=0, shard=1)
    store_rollouts(tmp_path, [group_of("c", [0.5])], iteration=1, shard=0)
    sql = "SELECT iteration, count(*) AS n, avg(reward) AS reward FROM trajectories GROUP BY 1 ORDER BY 1"
    assert select(tmp_path, sql).rows() == [(0, 4, 2 / 3), (1, 1, 0.5)]


def test_messages_are_json_in_sql(tmp_path: Path) -> None:
    store_rollouts(tmp_path, [group_of("a", [1.0])])
    assert select(tmp_path, "SELECT messages->0->>'content' FROM trajectories").item() == "go"


@pytest.mark.parametrize("view", ["trajectories", "groups", "batch", "evaluations", "checkpoints"])
def test_an_empty_run_has_empty_views(tmp_path: Path, view: str) -> None:
    assert len(select(tmp_path, f"FROM {view}")) == 0


def test_unfinished_and_superseded_folders_are_not_seen(tmp_path: Path) -> None:
    shard = store_rollouts(tmp_path, [group_of("a", [1.0])])
    copy = tmp_path / layout.SUPERSEDED / "then" / shard.path
    copy.parent.mkdir(parents=True)
    (tmp_path / shard.path).rename(copy)
    unfinished = tmp_path / layout.rollouts(0, 1)
    unfinished.mkdir(parents=True)
    (unfinished / tables.TRAJECTORIES).write_bytes(b"")
    assert len(select(tmp_path, "FROM trajectories")) == 0


def test_a_mistake_in_the_sql_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs, match=r"SQL: .*nowhere"):
        select(tmp_path, "FROM nowhere")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    shard = store_rollouts(tmp_path, [group_of("a", [1.0])])
    file = tmp_path / shard.path / tables.TRAJECTORIES
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CorruptArtifact, match=r"trajectories\.parquet"):
        select(tmp_path, "FROM trajectories")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    groups = [group_of("a", [1.0, None]), group_of("b", [0.25])]
    shard = store_rollouts(tmp_path, groups)
    frame = tables.read([tmp_path / shard.path / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    assert tables.groups_of_frame(frame) == groups
