"""Forks: a new run from a checkpoint of another; whole or not there; its origin told, its settings checked."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import s3_fixtures as s3
from flow_fixtures import Steps, config_of
from s3_fixtures import Proxy, Weed
from typer.testing import CliRunner

from flows import tasks
from flows.cli import app
from flows.config import RunConfig
from flows.train import train
from steps.backup import backup
from steps.common import layout
from steps.common.artifacts import BaseModelFiles, Checkpoint, Manifest, read_manifest, verify
from steps.common.errors import CorruptArtifact, InvalidInputs
from steps.common.origin import Origin, origin_of
from steps.common.runs import RunRecord, write_record
from steps.common.settings import LoraSettings
from steps.common.status import damages, status_of
from steps.common.step import Inputs, Step, Workspace
from steps.fork import ForkInputs, make_run, make_run_from_bucket
from steps.initialize import INITIALIZE
from steps.remote.settings import BucketSettings
from steps.train import TRAIN

LORA = LoraSettings(rank=8, alpha=16, target_modules=("v_proj", "q_proj"))
POLICY = ["adapter_config.json", "adapter_model.safetensors", "probe.json"]
OPTIMIZER = ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"]


def fill(folder: Path) -> None:
    """A checkpoint's files, as far as forks look into them."""
    for name in (*POLICY, *OPTIMIZER):
        (folder / name).write_text(name)
    config = {"r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": sorted(LORA.target_modules)}
    (folder / POLICY[0]).write_text(json.dumps(config))


def make_origin(root: Path, base_model: str = layout.MODEL) -> None:
    """A run with a base model of its own and checkpoint 3."""

    def checkpoint(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        fill(workspace.out)
        facts = {"iteration": 3, "step": 6, "updated": True, "metrics": {"loss": 0.5}}
        return {"base_model": base_model, "base_digest": digest, **facts}

    def model(inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        (workspace.out / "config.json").write_text("{}")
        return {"parameters": 1, "metrics": {}}

    digest = Step("pretrain", Inputs, BaseModelFiles, model).run(Inputs(), root, layout.MODEL).digest
    (root / "checkpoints").mkdir(parents=True)
    Step("train", Inputs, Checkpoint, checkpoint).run(Inputs(), root, layout.checkpoint(3))
    write_record(root, RunRecord(config={"name": root.name, "iterations": 9}, versions={}))


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def asked(root: Path, **changes: Any) -> ForkInputs:
    facts: dict[str, Any] = {"run": root.name, "iteration": 3, "source": str(root), "folder": root}
    return ForkInputs(**(facts | changes))


def test_a_fork_holds_the_checkpoint_and_its_base_model(runs: Path) -> None:
    make_origin(runs / "first")
    new = make_run(asked(runs / "first"), "second")
    assert sorted(path.name for path in new.iterdir()) == [".lock", "model", "origin", "run.json"]
    assert all(damage is None for _, damage in damages(new))
    for path in (layout.checkpoint(3), layout.MODEL):
        then = verify(runs / "first" / path)
        assert verify(new / (layout.ORIGIN if "checkpoints" in path else path)).files == then.files
    assert manifest_of(new / layout.ORIGIN).inputs == {
        "run": "first",
        "iteration": 3,
        "with_optimizer": True,
        "source": str(runs / "first"),
    }
    origin = origin_of(new)
    assert origin is not None
    assert (origin.checkpoint.path, origin.checkpoint.step) == ("checkpoints/0003", 6)
    assert origin.checkpoint.digest == verify(runs / "first/checkpoints/0003").digest
    assert origin.lora == LoraSettings(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))


def test_the_command_tells_and_status_remembers(runs: Path) -> None:
    make_origin(runs / "first")
    told = CliRunner().invoke(app, ["fork", "first", "--iteration", "3", "second", "--without-optimizer"])
    assert (told.exit_code, "--set name=second" in told.output) == (0, True), told.output
    assert sorted(manifest_of(runs / "second/origin").files) == POLICY
    assert status_of(runs / "second").origin == "checkpoint 3 of first, without its optimizer"
    assert "forked from checkpoint 3 of first" in CliRunner().invoke(app, ["status", "second"]).output
    assert status_of(runs / "first").origin is None


def test_a_model_in_a_folder_is_linked_to(runs: Path, tmp_path: Path) -> None:
    make_origin(runs / "first", layout.BASE)
    (runs / "first/base").symlink_to(tmp_path)
    assert (make_run(asked(runs / "first"), "second") / "base").readlink() == tmp_path


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("first", {}, InvalidInputs, "first is there already: give the fork another name"),
        ("../second", {}, InvalidInputs, "second is no name"),
        ("second", {"iteration": 4}, InvalidInputs, "there is no .*checkpoints/0004, or it was never finished"),
        ("second", {"folder": Path("/nowhere")}, InvalidInputs, "there is no /nowhere/checkpoints/0003"),
    ],
)
def test_what_can_not_be_forked_leaves_nothing(
    runs: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    make_origin(runs / "first")
    with pytest.raises(error, match=message):
        make_run(asked(runs / "first", **changes), name)
    assert [path.name for path in runs.glob("[!.]*")] == ["first"]


def test_a_damaged_file_is_not_copied(runs: Path) -> None:
    make_origin(runs / "first")
    file = runs / "first/checkpoints/0003/optimizer.pt"
    file.write_text("Optimizer.pt")
    with pytest.raises(CorruptArtifact, match=r"optimizer\.pt differs from its manifest"):
        make_run(asked(runs / "first"), "second")
    assert not (runs / "second").exists()
    assert origin_of(make_run(asked(runs / "first", with_optimizer=False), "second")), "what is whole can be had"


@pytest.mark.slow
def test_a_fork_from_a_bucket_brings_its_checkpoint_and_the_model_only(
    runs: Path, place: BucketSettings, weed: Weed, proxy: Proxy
) -> None:
    def store(content: bytes) -> None:
        key = place.key("first", "checkpoints/0003/scheduler.pt")
        weed.client().put_object(Bucket=place.bucket, Key=key, Body=content)

    make_origin(runs / "first")
    s3.make(runs / "first", layout.checkpoint(4))
    backup(runs / "first", place)
    shutil.rmtree(runs / "first")
    proxy.seen.clear()
    asked = ["fork", "first", "second", "--iteration", "3", "--from", place.url()]
    store(b"Scheduler.pt")
    assert isinstance(CliRunner().invoke(app, asked).exception, CorruptArtifact)
    assert [path.name for path in runs.glob("[!.]*")] == []
    store(b"scheduler.pt")
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert [path.name for path in runs.iterdir()] == ["second"]
    assert all(damage is None for _, damage in damages(runs / "second"))
    assert manifest_of(runs / "second/origin").inputs["source"] == place.url("first")
    gets = [path.partition("?")[0] for line in proxy.seen if "GET" in line for path in line.split("/first/")[1:]]
    assert len([path for path in gets if path.endswith("adapter_model.safetensors")]) == 1, "not again what has come"
    assert {path.rpartition("/")[0] for path in gets} == {"checkpoints/0003", "model", ""}
    with pytest.raises(InvalidInputs, match="has no checkpoint 9: there are 0003, 0004"):
        make_run_from_bucket(place, "first", 9, True, "third")
    with pytest.raises(InvalidInputs, match=r"there is no run 'other' in s3://.*: there are first"):
        make_run_from_bucket(place, "other", 3, True, "third")


KILLED = """
import os, signal, sys
from pathlib import Path
from steps import fork
fork._take_base_along = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
root = Path(sys.argv[1])
fork.make_run(fork.ForkInputs(run="first", iteration=3, source=str(root), folder=root), "second")
"""


def test_after_a_kill_the_same_command_makes_it_whole(runs: Path) -> None:
    make_origin(runs / "first")
    done = subprocess.run([sys.executable, "-c", KILLED, runs / "first"], env=os.environ, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (runs / "second").exists()
    assert all(damage is None for _, damage in damages(make_run(asked(runs / "first"), "second")))
    assert sorted(path.name for path in runs.iterdir()) == ["first", "second"]


def an_origin(**changes: Any) -> Origin:
    checkpoint = Checkpoint(
        path="checkpoints/0003",
        digest="d",
        iteration=3,
        base_model="owner/name",
        step=6,
        updated=True,
        metrics={},
    )
    return Origin(
        path="origin",
        digest="d",
        run="first",
        checkpoint=checkpoint.model_copy(update=changes),
        lora=LORA,
        with_optimizer=True,
    )


def test_settings_for_another_adapter_or_base_model_are_refused() -> None:
    an_origin().check("owner/name", None, LORA.model_copy(update={"target_modules": ("q_proj", "v_proj")}))
    with pytest.raises(InvalidInputs, match=r"lora = \{ rank = 16.*checkpoint 3 of first.*\{ rank = 8, alpha = 16"):
        an_origin().check("owner/name", None, LORA.model_copy(update={"rank": 16}))
    with pytest.raises(InvalidInputs, match=r"name owner/other as base model, but .* is on owner/name: name that one"):
        an_origin().check("owner/other", None, LORA)
    on_a_folder = an_origin(base_model="base", base_digest="0123456789abcdef")
    with pytest.raises(InvalidInputs, match=r"the model in a folder \(digest fedcba987654\).*\(digest 0123456789ab\)"):
        on_a_folder.check("base", "fedcba9876543210", LORA)
    with pytest.raises(InvalidInputs, match="one that is still to be made"):
        on_a_folder.check(None, None, LORA)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("prefect_server")
def test_a_fork_is_trained_like_any_run(
    steps: Steps, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another environment and with another seed, for which the base model is not made again."""

    def settings(name: str, *overrides: str) -> RunConfig:
        return config_of(tmp_path, f"name={name}", "iterations=1", "lora.rank=8", "lora.alpha=16", *overrides)

    def checkpoint(inputs: Any, workspace: Workspace) -> dict[str, Any]:
        fill(workspace.out)
        base = getattr(inputs, "checkpoint", inputs)
        return steps.checkpoint(inputs, workspace) | {"base_model": base.base_model, "base_digest": base.base_digest}

    for step in (INITIALIZE, TRAIN):
        tiny = Step(step.name, step.inputs, Checkpoint, checkpoint)
        monkeypatch.setattr(tasks, step.name.upper(), tiny)
    modules = 'lora.target_modules=["v_proj", "q_proj"]'
    train(settings("first", modules))
    make_run(asked(runs / "first", iteration=1), "second")
    steps.made.clear()
    train(settings("second", modules, "seed=7", "environment.name=sums"))
    assert steps.made[0] == "checkpoints/0000"
    assert steps.made[-1] == "evaluations/0001"
    inputs = manifest_of(runs / "second/checkpoints/0000").inputs
    assert inputs["origin"]["checkpoint"]["path"] == "checkpoints/0001"
    with pytest.raises(InvalidInputs, match=r"lora = .* is not that of the adapter"):
        train(settings("second", 'lora.target_modules=["o_proj"]', "seed=7", "environment.name=sums"))
