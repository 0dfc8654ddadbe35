"""SQL over a run: a DuckDB view a table, straight over the run's Parquet files.

In memory, since a DuckDB file opened for writing locks every other process out. Only finished artifacts are seen:
what is being written, was set aside, or was pruned, is not in a view.
"""

import json
from pathlib import Path

import duckdb
import polars as pl

from steps.common import layout, tables
from steps.common.artifacts import read_manifest
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.evaluations import played

EVALUATION_COLUMNS: tables.Schema = {**tables.TRAJECTORY_COLUMNS, "filename": pl.String}


def connect(root: Path) -> duckdb.DuckDBPyConnection:
    """A connection with the views `trajectories`, `groups`, `judgements`, `batch`, `evaluations` and `checkpoints`.

    `evaluations` has the columns of `trajectories`, of held-out tasks, and `model`: who played, `run@7` for a
    checkpoint. `judgements` has rows where a judge scored.
    Raises `CorruptArtifact`, naming the file.
    """
    connection = duckdb.connect()
    iterations = [root / "iterations" / f"{i:04d}" for i in layout.numbered(root, "iterations")]
    shards = [
        iteration / "rollouts" / f"{s:03d}" for iteration in iterations for s in layout.numbered(iteration, "rollouts")
    ]
    _view(connection, "trajectories", shards, tables.TRAJECTORIES, tables.TRAJECTORY_COLUMNS)
    _view(connection, "groups", [i / "groups" for i in iterations], tables.GROUPS, tables.GROUP_COLUMNS)
    judged = [i / "groups" for i in iterations if (i / "groups" / tables.JUDGEMENTS).exists()]
    _view(connection, "judgements", judged, tables.JUDGEMENTS, tables.JUDGEMENT_COLUMNS)
    _view(connection, "batch", [i / "batch" for i in iterations], tables.BATCH, tables.BATCH_COLUMNS)
    _evaluations(connection, root)
    connection.register("checkpoints", _checkpoints(root))
    return connection


def select(root: Path, sql: str) -> pl.DataFrame:
    """The rows that `sql` gives over the run's views. Raises `InvalidInputs` where DuckDB refuses it."""
    with connect(root) as connection:
        try:
            rows: pl.DataFrame = connection.sql(sql).pl()
        except duckdb.Error as error:
            raise InvalidInputs(f"SQL: {str(error).splitlines()[0]}") from None
    return rows


def _evaluations(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """The view, with who played: that is in the manifests, so that files of all versions can be read."""
    found = [one for one in played(root) if one.is_usual]
    models = {str(root / one.path / tables.TRAJECTORIES): one.model for one in found}
    _view(connection, "_evaluations", [root / one.path for one in found], tables.TRAJECTORIES, EVALUATION_COLUMNS)
    schema = {"filename": pl.String, "model": pl.String}
    connection.register("_models", pl.DataFrame(list(models.items()), schema=schema, orient="row"))
    connection.execute(
        "CREATE VIEW evaluations AS SELECT * EXCLUDE filename FROM _evaluations JOIN _models USING (filename)"
    )


def _view(
    connection: duckdb.DuckDBPyConnection, name: str, folders: list[Path], file: str, schema: tables.Schema
) -> None:
    files = [str(folder / file) for folder in folders if (manifest := read_manifest(folder)) and not manifest.pruned]
    if not files:
        connection.register(name, pl.DataFrame(schema=schema))
        return
    try:
        connection.read_parquet(files, filename="filename" in schema).create_view(name)
    except duckdb.Error as error:
        raise CorruptArtifact(f"can't read the table {name}: {str(error).splitlines()[0]}") from None


def _checkpoints(root: Path) -> pl.DataFrame:
    """A row a finished checkpoint: its iteration, optimizer steps, whether it was updated, metrics as JSON."""
    manifests = [read_manifest(root / layout.checkpoint(i)) for i in layout.numbered(root, "checkpoints")]
    rows = [
        {
            **{key: manifest.artifact[key] for key in ("iteration", "step", "updated")},
            "metrics": json.dumps(manifest.artifact["metrics"]),
            "seconds": manifest.seconds,
        }
        for manifest in manifests
        if manifest
    ]
    schema = {
        "iteration": pl.Int32,
        "step": pl.Int64,
        "updated": pl.Boolean,
        "metrics": pl.String,
        "seconds": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema)
