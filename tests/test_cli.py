"""The command: what it prints of a run, and that each mistake is one line on stderr and a status that is not zero."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_fixtures import group_of, store_rollouts

from flows import server
from flows.daemons import started
from flows.server import ServerRecord, stop_server
from steps.common.runs import RunRecord, locked, write_record

NIGHTSCHOOL = Path(sys.executable).parent / "nightschool"


def nightschool(*arguments: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([NIGHTSCHOOL, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def run(runs: Path) -> Path:
    """A run with one shard of rollouts."""
    root = runs / "night"
    write_record(root, RunRecord(config={"iterations": 2}, versions={}))
    store_rollouts(root, [group_of("a", [0.0, 1.0]), group_of("b/c", [None, 0.5])])
    return root


def test_status_is_json_for_programs(run: Path) -> None:
    status = json.loads(nightschool("status", "night", "--json").stdout)
    assert status == {
        "run": "night",
        "state": "stopped",
        "origin": None,
        "iterations": 2,
        "checkpoints": [],
        "evaluations": [],
        "models": [],
        "last_iteration": None,
        "start": None,
        "backup": None,
        "champion": None,
        "last_decision": None,
    }
    with locked(run):
        assert json.loads(nightschool("status", str(run), "--json").stdout)["state"] == "running"


def test_looking_at_a_run_is_light(run: Path) -> None:
    """Without Prefect, Polars and DuckDB, which take seconds."""
    code = "import sys; from flows.cli import app; app(['status', 'night'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60)
    assert {"prefect", "polars", "duckdb"}.isdisjoint(done.stdout.split())


def test_a_trajectory_can_be_read(run: Path) -> None:
    listed = nightschool("show", "night").stdout
    assert "0000/a/1" in listed and "0000/b/c/0" in listed and "ValueError" in listed
    text = nightschool("show", "night", "--trajectory", "0000/a/1").stdout
    assert "go" in text and "gone" in text and "reward 1" in text and "2 tokens · mean logprob -0.25" in text
    assert "ValueError: no such move" in nightschool("show", "night", "--trajectory", "0000/b/c/0").stdout


def test_sql_is_answered(run: Path) -> None:
    answer = nightschool("sql", "night", "SELECT task_id, max(reward) AS best FROM trajectories GROUP BY 1 ORDER BY 1")
    assert "best" in answer.stdout and "0.5" in answer.stdout


def test_verify_names_what_is_damaged(run: Path) -> None:
    assert nightschool("verify", "night").stdout == "1 of 1 artifacts are whole\n"
    table = run / "iterations/0000/rollouts/000/trajectories.parquet"
    table.write_bytes(bytes(table.stat().st_size))
    found = nightschool("verify", "night")
    assert (found.returncode, found.stderr) == (1, f"{table} differs from its manifest: the sha256 is another\n")


def test_rewind_sets_aside(run: Path) -> None:
    assert "set 1 folders aside" in nightschool("rewind", "night", "--iteration", "0", "--step", "rollout").stdout
    assert not (run / "iterations/0000/rollouts/000").exists()
    assert list(run.glob("superseded/*/iterations/0000/rollouts/000/manifest.json"))


CONFIG = """
name = "night"
iterations = 1
[environment]
name = "tic_tac_toe"
[model.pretrain]
steps = 1
"""


@pytest.mark.parametrize(
    "command, message",
    [
        ("status nowhere", "there is no run 'nowhere' in {runs}: there are night"),
        ("show night --trajectory 7", "'7' names no trajectory"),
        ("show night --trajectory 0001/a/0", "there is no trajectory '0001/a/0'"),
        ("sql night SELEC", "SQL: Parser Error"),
        ("rewind night --iteration 3 --step train", "has nothing that train of iteration 3 made"),
        ("rewind night --iteration 0 --step rollout --shard 1", "nothing that rollout of iteration 0, shard 1 made"),
        ("rewind night --iteration 0 --step group --shard 0", "only rollouts have shards, not group"),
        ("rescore night --from 0", "run.json: name is missing"),
        ("train {runs}/nowhere.toml", "can't read {runs}/nowhere.toml: No such file or directory"),
        ("train {config} --set environment.name=chess", "there is no environment 'chess'"),
        ("train {config} --set environment.name=no_such.module:Thing", "there is no module 'no_such' in "),
        ("train {config} --set rollout.gruops=3", "unknown key rollout.gruops; did you mean rollout.groups?"),
        ("train {config} --set rollout.groups=x", "rollout.groups = 'x': should be a valid integer"),
        ("train {config} --set rollout.groups=9999", "rollout.groups = 9999, but the train split"),
        ("train {config} --set model.base=models/none", "give either model.base or a table [model.pretrain]"),
    ],
)
def test_a_mistake_is_one_line(run: Path, runs: Path, command: str, message: str) -> None:
    config = runs / "night.toml"
    config.write_text(CONFIG)
    done = nightschool(*command.format(runs=runs, config=config).split())
    assert done.returncode not in (0, 1)
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert message.format(runs=runs) in done.stderr
    assert not (runs / ".prefect").exists()  # nothing was started for it


def test_a_damaged_table_is_named(run: Path) -> None:
    table = run / "iterations/0000/rollouts/000/trajectories.parquet"
    table.write_bytes(b"no Parquet")
    done = nightschool("show", "night")
    assert done.returncode == 202
    assert len(done.stderr.splitlines()) == 1 and str(table) in done.stderr


def test_a_damaged_record_is_named(run: Path) -> None:
    (run / "run.json").write_text("{")
    done = nightschool("status", "night")
    assert done.returncode == 202
    assert len(done.stderr.splitlines()) == 1 and str(run / "run.json") in done.stderr


def test_down_stops_no_stranger(runs: Path) -> None:
    home = server.home()
    assert nightschool("down").stdout == "there was none\n"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True) as stranger:
        record = ServerRecord(pid=stranger.pid, started="1", port=1)
        (home / "server.json").write_text(record.model_dump_json())
        assert not stop_server(home)
        assert stranger.poll() is None

        ours = ServerRecord(pid=stranger.pid, started=started(stranger.pid) or "", port=1)
        (home / "server.json").write_text(ours.model_dump_json())
        began = time.monotonic()
        assert stop_server(home)
        assert time.monotonic() - began < 5
