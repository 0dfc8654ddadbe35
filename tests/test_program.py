"""An agent that is a program: what it is given, what is kept of it, and how it ends, whatever it does."""

import json
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_fixtures import QUICK, stub, venue_at
from stub_server import END, StubServer, render

from environments import Task, Trajectory, load
from environments._program import LOGGED, TAIL
from steps.agent.play import play

__all__ = ["stub"]
TASK = Task(id="lemon", seed=3, data={"question": "What colour?"})
LIMITS = QUICK.model_copy(update={"rollout_timeout": 20, "agent_retries": 0})
HELPERS = """
import json, os, sys, time, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=10))

def ask(question):
    messages = [{"role": "user", "content": question}]
    answer = post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages})
    return answer["choices"][0]["message"]["content"]
"""
PATIENCE = 20.0

Play = Callable[..., Any]


@pytest.fixture
def played(stub: StubServer, tmp_path: Path) -> Play:
    """Plays the task by a program with this text."""
    (tmp_path / "tasks.jsonl").write_text('{"id": "lemon"}\n')

    async def play_by(text: str, limits: dict[str, float] = {}, **options: Any) -> Trajectory:  # noqa: B006
        (tmp_path / "agent.py").write_text(HELPERS + textwrap.dedent(text))
        options = {"command": [sys.executable, "-S", str(tmp_path / "agent.py")]} | options
        environment = load("program", file=tmp_path / "tasks.jsonl", **options)
        async with venue_at(stub, environment, LIMITS.model_copy(update=limits)) as venue:
            return await play(venue, TASK, attempt=0)

    return play_by


async def test_a_program_gets_the_task_asks_and_posts_its_reward(
    played: Play, stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-user's-own")
    monkeypatch.setenv("ATLAS_KEY", "a")
    monkeypatch.setenv("OTHER_KEY", "o")
    stub.reply = lambda request, choice: "yellow"
    trajectory = await played(
        """
        task = json.load(sys.stdin)
        print("asked about", task["id"])
        reply = ask(task["data"]["question"])
        metadata = {"task": task, "environment": sorted(os.environ), "key": os.environ["OPENAI_API_KEY"]}
        post("/reward", {"reward": len(reply), "metrics": {"words": 1}, "metadata": metadata})
        """,
        forwarded=["ATLAS_KEY", "NOT_SET"],
    )
    assert (trajectory.failure, trajectory.reward, trajectory.metrics) == (None, 6.0, {"words": 1.0})
    assert trajectory.metadata["task"] == json.loads(TASK.model_dump_json())
    assert trajectory.metadata["key"] != "the-user's-own"
    given = set(trajectory.metadata["environment"])
    assert given >= {"PATH", "ATLAS_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"}
    assert not given & {"OTHER_KEY", "PYTEST_CURRENT_TEST", "NOT_SET"}
    assert "[lemon] asked about lemon\n" in capsys.readouterr().out

    [sequence] = trajectory.sequences
    assert sequence.token_ids == [*render([{"role": "user", "content": "What colour?"}]), *b"yellow", END]
    assert sum(sequence.mask) == trajectory.completion_tokens == 7


FAILURES = {
    "raises": ("ask('a'); {}['b']", "ProgramFailed", r"agent.py` ended with exit status 1: KeyError: 'b'"),
    "refused": ("post('/responses', {})", "ProgramFailed", "HTTPError: HTTP Error 404"),
    "silent": ("sys.exit(3)", "ProgramFailed", "exit status 3: it printed nothing"),
    "killed": (
        "print('so long', flush=True); os.kill(os.getpid(), 15)",
        "ProgramFailed",
        r"signal 15 \(Terminated\): so",
    ),
    "posts_nothing": ("ask('a')", "NoResult", r'ended without a reward: it must POST \{"reward": 1.0\} to \$OPENAI_B'),
    "posts_text": ("post('/reward', {'reward': 'high'})", "ProgramFailed", "HTTP Error 400"),
    "posts_then_fails": ("post('/reward', {'reward': 1}); sys.exit(1)", "ProgramFailed", "exit status 1"),
    "posts_twice": ("[post('/reward', {'reward': 1}) for _ in 'ab']", "ProgramFailed", "HTTP Error 409"),
    "asks_after_its_reward": ("post('/reward', {'reward': 1}); ask('a')", "ProgramFailed", "HTTP Error 404"),
    "hangs": ("time.sleep(600)", "RolloutTimeout", "no result after 1 s"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_program_that_fails_is_a_failed_rollout(played: Play, case: str) -> None:
    text, kind, message = FAILURES[case]
    trajectory = await played(text, {"rollout_timeout": 1} if case == "hangs" else {})
    assert trajectory.failure and trajectory.reward is None
    assert trajectory.failure.type == kind
    assert re.search(message, trajectory.failure.message), trajectory.failure.message
    assert "\n" not in trajectory.failure.message
    if case == "raises":
        assert "line" in trajectory.failure.traceback and "The end of what it printed" in trajectory.failure.traceback
        assert trajectory.turns == 1


async def test_a_program_that_is_not_there_is_named(played: Play) -> None:
    trajectory = await played("", command=["no-such-program", "agent.mjs"])
    assert trajectory.failure
    assert "`no-such-program agent.mjs` can't be started: No such file or directory (PATH" in trajectory.failure.message


async def test_what_a_program_prints_is_bounded(played: Play, capsys: pytest.CaptureFixture[str]) -> None:
    trajectory = await played(
        """
        print("first")
        for _ in range(3000): print("x" * 1000)
        sys.exit("ValueError: last")
        """
    )
    assert trajectory.failure
    assert trajectory.failure.message.endswith("ValueError: last")
    assert len(trajectory.failure.traceback) < 3 * TAIL
    said = capsys.readouterr().out
    assert "[lemon] first\n" in said and f"only {LOGGED} characters" in said
    assert len(said) < 2 * LOGGED


async def test_no_process_of_a_program_outlives_its_rollout(played: Play, tmp_path: Path) -> None:
    leaves_one = f"""
        import subprocess
        left = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "left")!r}, "w").write(str(left.pid))
        post("/reward", {{"reward": 1}})
        """
    started = time.monotonic()
    assert (await played(leaves_one)).reward == 1
    assert gone(int((tmp_path / "left").read_text()))
    assert (await played(leaves_one + "time.sleep(600)", {"rollout_timeout": 2})).failure.type == "RolloutTimeout"
    assert gone(int((tmp_path / "left").read_text()))
    assert time.monotonic() - started < PATIENCE


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
