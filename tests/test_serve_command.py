"""`nightschool serve`: which checkpoint it serves, to whom, and that it leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from test_champion import crown
from test_cli import NIGHTSCHOOL, nightschool
from vllm_fixtures import PATIENCE, probe_tokens

from flows.config import RunConfig
from flows.runtimes.service import DAY, served_by_day
from flows.serve import announce
from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.champion import champion
from steps.common.models import PROBE
from steps.common.runs import RunRecord, locked, write_record
from steps.common.step import Inputs, Step
from steps.serving.adapters import PolicyEndpoint
from steps.serving.probe import Verdict

CONFIG = {
    "name": "day",
    "iterations": 2,
    "environment": {"name": "tic_tac_toe"},
    "model": {"pretrain": {"steps": 1}},
    "lora": {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "serve": {"max_model_len": 1024, "cpu_cache_mib": 64, "startup_timeout": PATIENCE},
}


def published(root: Path, iteration: int, source: Path | None = None) -> Checkpoint:
    """A checkpoint of the run at `root`, with the files of `source`."""

    def work(inputs: Inputs, workspace: object) -> dict[str, object]:
        out: Path = workspace.out  # type: ignore[attr-defined]
        if source:
            shutil.copytree(source, out, dirs_exist_ok=True)
        return {"iteration": iteration, "base_model": "model", "step": iteration, "updated": True, "metrics": {}}

    return Step("train", Inputs, Checkpoint, work).run(Inputs(), root, layout.checkpoint(iteration))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run without checkpoints."""
    config = RunConfig.model_validate(CONFIG).model_dump(mode="json")
    write_record(tmp_path / "day", RunRecord(config=config, versions={}))
    return tmp_path / "day"


@pytest.mark.parametrize(
    "options, env, message",
    [
        (["--champion"], {}, "has no champion yet: `nightschool promote` makes one"),
        (["--champion", "--iteration", "1"], {}, "--champion and --iteration ask for one checkpoint each"),
        (["--iteration", "7"], {}, "has no finished checkpoint 7: there are 0, 1"),
        (["--host", "no.such.host.invalid"], {}, "can't listen on no.such.host.invalid:0"),
        (["--port", "{taken}"], {}, "can't listen on 127.0.0.1:{taken} (Address already in use): take another"),
        (
            [],
            {"NIGHTSCHOOL_SERVE_KEY": "two words"},
            "NIGHTSCHOOL_SERVE_KEY holds characters that no HTTP header takes",
        ),
        ([], {"NIGHTSCHOOL_SERVE_PYTHON": "/nowhere/python"}, "there is no serve environment at /nowhere/python"),
    ],
)
def test_what_can_not_be_served_is_one_line(root: Path, options: list[str], env: dict[str, str], message: str) -> None:
    for iteration in range(2):
        published(root, iteration)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        done = nightschool("serve", root, *(option.format(taken=taken) for option in options), **env)
    assert (done.returncode, done.stdout) == (202, "")
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert message.format(taken=taken) in done.stderr


def test_a_checkpoint_is_served_once(root: Path) -> None:
    published(root, 0)
    with locked(root / DAY / "0000"):
        done = nightschool("serve", root)
    assert done.returncode == 1
    assert re.search(r"day/logs/day/0000 is in use by process \d+", done.stderr)


@pytest.mark.parametrize("secret", [False, True])
def test_a_key_is_told_where_it_was_made_up(root: Path, secret: bool) -> None:
    said: list[str] = []
    verdict = Verdict(answers_as="checkpoint", rms=0.0, shares={}, moved={})
    policy = PolicyEndpoint(base_url="http://127.0.0.1:1/v1", api_key="made-up", model="day-0000-d", verdict=verdict)
    announce(policy, published(root, 0), secret, said.append)
    assert ("made-up" in "\n".join(said)) is not secret
    assert "NIGHTSCHOOL_SERVE_KEY" in said[-1] or not secret


@contextmanager
def serving(*options: str | Path, **env: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    """The command at work, and what it says: the words of each line by its first."""
    command = [NIGHTSCHOOL, "serve", *map(str, options)]
    with subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said: dict[str, str] = {}
        try:
            for text in process.stdout:  # pytest's own time limit ends a wait in vain
                match = re.fullmatch(r"(\S+(?: \S+)?)  +(.*)\n", text)
                said |= {match[1]: match[2]} if match else {}
                if "key" in said:
                    break
            yield process, said
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(600)
def test_after_a_rollback_the_champion_before_is_served(root: Path, tiny_run: Path) -> None:
    shutil.copytree(tiny_run / "model", root / "model")
    zero, one, two = (published(root, i, tiny_run / layout.checkpoint(i)) for i in range(3))
    crown(root, 0, "promoted", one, zero)
    crown(root, 1, "promoted", two, one)
    assert nightschool("rollback", root).returncode == 0
    assert champion(root) == 1

    # A night is under way; it neither waits nor is waited for.
    with locked(root), serving(root, "--champion", NIGHTSCHOOL_SERVE_KEY="day-key") as (process, said):
        assert said["checkpoint"] == "1"
        assert said["model"] == f"day-0001-{one.digest[:8]}"
        assert "day-key" not in said["key"]
        assert list(served_by_day(root)) == [(1, said["base URL"])]
        answered = logprobs(said["base URL"], said["model"], probe_tokens(root / one.path))
        expected, other = (
            json.loads((root / c.path / PROBE).read_text())["sequences"][0]["logprobs"] for c in (one, two)
        )
        assert answered == pytest.approx(expected, abs=1e-4)
        assert answered != pytest.approx(other, abs=1e-4)
        assert httpx.get(f"{said['base URL']}/models", headers={"Authorization": "Bearer other"}).status_code == 401
        assert not (root / layout.LOGS / "serve").exists()  # where a night's own server has its files

        told = nightschool("rollback", root, "--to", "2").stdout
        assert told.splitlines()[-1].startswith(f"served    checkpoint 1 at {said['base URL']}, until ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout and process.stdout.read().endswith("stopped\n")
    assert list(served_by_day(root)) == []
    assert not (root / DAY / "0001/endpoint.json").exists()
    with pytest.raises(httpx.ConnectError):
        time.sleep(0.5)
        httpx.get(said["base URL"])


def logprobs(url: str, model: str, tokens: list[int]) -> list[float]:
    """Of each token but the first, as a server gives them to who has the key."""
    request = {"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/completions", json=request, headers={"Authorization": "Bearer day-key"}, timeout=60)
    scores = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    return [score[str(token)]["logprob"] for score, token in zip(scores[1:], tokens[1:], strict=True)]
