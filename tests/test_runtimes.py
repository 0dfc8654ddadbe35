"""Runtimes: what a step's success, refusal, crash, signal and timeout become; the warm parent's promises."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flows.runtimes import InlineSettings, ProcessSettings, make_runtime
from flows.runtimes.base import Runtime
from flows.runtimes.process import ProcessRuntime
from flows.runtimes.warm import WarmParent, WarmParentDied
from steps.common.artifacts import Artifact
from steps.common.errors import InvalidInputs, StepFailed
from steps.common.step import Inputs, Step, Workspace

ODD_STEP = """
import os, signal, sys, time
from pathlib import Path
from steps.common.errors import InvalidInputs, ServerFault
from steps.common.step import Inputs, Step, Workspace
from steps.common.artifacts import Artifact

class OddInputs(Inputs):
    how: str

class Odd(Artifact):
    how: str
    policy: str

def odd(inputs, workspace):
    print("at work", inputs.how, flush=True)
    match inputs.how:
        case "refuse": raise InvalidInputs("the inputs are odd")
        case "fault": raise ServerFault("the server is gone")
        case "raise": raise RuntimeError("a bug")
        case "signal": os.kill(os.getpid(), signal.SIGSEGV)
        case "hang": (workspace.root / "pid").write_text(str(os.getpid())); time.sleep(60)
    (workspace.out / "file").write_text(inputs.how)
    return {"how": inputs.how, "policy": os.environ.get("ODD_POLICY", "none")}

ODD = Step("odd", OddInputs, Odd, odd)
if __name__ == "__main__":
    ODD.main()
"""


class OddInputs(Inputs):
    how: str


class Odd(Artifact):
    how: str
    policy: str


def _work(inputs: OddInputs, workspace: Workspace) -> dict[str, Any]:
    raise AssertionError("the process runtime must not work here")


ODD = Step("odd", OddInputs, Odd, _work)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessRuntime]:
    """A process runtime whose parents can import the module `steps.odd`."""
    module = tmp_path / "path" / "odd_step.py"
    module.parent.mkdir()
    module.write_text(ODD_STEP)
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.setattr("flows.runtimes.process.module_of", lambda step: "odd_step")
    with closing(ProcessRuntime(tmp_path / "run", ProcessSettings())) as runtime:
        yield runtime


def play(runtime: Runtime, how: str, said: list[str], timeout: float = 30.0) -> Odd:
    return runtime.run(ODD, OddInputs(how=how), f"odd/{how}", env={"ODD_POLICY": "x"}, timeout=timeout, say=said.append)


def test_a_step_runs_elsewhere_and_leaves_its_artifact(processes: ProcessRuntime, said: list[str]) -> None:
    assert play(processes, "well", said) == Odd(
        path="odd/well", digest=play(processes, "well", []).digest, how="well", policy="x"
    )
    assert said == ["at work well"]
    assert (processes.root / "logs/odd/odd-well.log").read_text() == "at work well\n"


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("refuse", InvalidInputs, "^the inputs are odd$"),
        ("fault", StepFailed, "^odd/fault: the server is gone .exit status 1, log .*odd-fault.log.$"),
        ("raise", StepFailed, "odd/raise: RuntimeError: a bug .exit status 1"),
        ("signal", StepFailed, "odd/signal: was killed by SIGSEGV .exit status -11"),
    ],
)
def test_failures_are_told_apart(
    processes: ProcessRuntime, said: list[str], how: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        play(processes, how, said)
    assert not (processes.root / "odd" / how).exists()


def test_a_step_that_takes_too_long_is_killed(processes: ProcessRuntime, said: list[str]) -> None:
    with pytest.raises(StepFailed, match="was stopped after 5 s, its time limit"):
        play(processes, "hang", said, timeout=5.0)
    assert gone(int((processes.root / "pid").read_text()))


def test_a_killed_parent_takes_its_steps_along_and_is_replaced(processes: ProcessRuntime, said: list[str]) -> None:
    play(processes, "well", said)
    first = processes._parents["flow"].pid
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    assert play(processes, "again", said).how == "again"
    assert processes._parents["flow"].pid != first


def test_nothing_is_started_after_the_end(processes: ProcessRuntime, said: list[str]) -> None:
    play(processes, "well", said)
    processes.close()
    with pytest.raises(InvalidInputs, match="the flow has ended"):
        play(processes, "again", said)


def test_no_step_outlives_the_flow(tmp_path: Path) -> None:
    """The parent's stdin ends when whoever holds it does."""
    pidfile = tmp_path / "pid"
    script = f"import os, time, pathlib; pathlib.Path({str(pidfile)!r}).write_text(str(os.getpid())); time.sleep(60)"
    (tmp_path / "sleeper.py").write_text(script)
    parent = subprocess.Popen(
        [sys.executable, "-m", "steps.common.warm"],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    assert parent.stdin
    parent.stdin.write(json.dumps({"id": 1, "argv": ["sleeper"], "env": {}}).encode() + b"\n")
    parent.stdin.flush()
    wait_for(lambda: pidfile.exists() and pidfile.read_text() != "")
    parent.stdin.close()
    parent.wait(10)
    wait_for(lambda: gone(int(pidfile.read_text())))


def test_steps_of_one_parent_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "napper.py").write_text("import time; time.sleep(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = WarmParent(Path(sys.executable), [], tmp_path / "log")
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: parent.run(["napper"], {}, 20, print), range(4)))
    assert statuses == [0, 0, 0, 0]
    assert time.monotonic() - began < 3.5
    parent.close()


def test_a_parent_that_would_fork_threads_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parent = WarmParent(Path(sys.executable), ["threaded"], tmp_path / "log")
    with pytest.raises(WarmParentDied, match="ended with status 1"):
        parent.run(["json"], {}, 20, print)
    parent.close()
    assert "a fork might hang" in (tmp_path / "log").read_text()


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.runtimes.places import python_of

    monkeypatch.setenv("NIGHTSCHOOL_TRAIN_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidInputs, match="make setup"):
        python_of("train")


def test_inline_runs_here(tmp_path: Path) -> None:
    step = Step("odd", OddInputs, Odd, lambda i, w: {"how": i.how, "policy": os.environ["ODD_POLICY"]})
    with closing(make_runtime(InlineSettings(type="inline"), tmp_path)) as runtime:
        odd = runtime.run(step, OddInputs(how="here"), "odd/here", env={"ODD_POLICY": "x"}, timeout=1, say=print)
    assert odd.policy == "x"
    assert "ODD_POLICY" not in os.environ


def gone(pid: int) -> bool:
    """Ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Any, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
