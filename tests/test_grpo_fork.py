"""A fork goes on as its origin would have, and so does a run that was moved: bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from grpo_fixtures import LORA, make_base, ragged_rows, train_inputs, write_batch
from safetensors.torch import load_file

from steps.common import layout
from steps.common.artifacts import Checkpoint
from steps.common.models import PROBE, Probe, digest_of_model, link_base
from steps.common.origin import Origin, origin_of
from steps.common.runs import RUNS, RunRecord, write_record
from steps.fork import ForkInputs, make_run
from steps.grpo.adapter import WEIGHTS
from steps.initialize import INITIALIZE, InitializeInputs
from steps.train import TRAIN

pytestmark = pytest.mark.train

SETTINGS = {"old_logprobs": "recompute", "beta": 0.1}


def start(root: Path, folder: Path, origin: Origin | None = None) -> Checkpoint:
    """Checkpoint 0 of a run on the base model in `folder`."""
    link_base(root, folder, digest_of_model(folder))
    facts: dict[str, Any] = {"base_model": layout.BASE, "base_digest": digest_of_model(folder), "lora": LORA}
    return INITIALIZE.run(InitializeInputs(**facts, origin=origin), root, layout.checkpoint(0))


def train(root: Path, checkpoint: Checkpoint, path: str, seed: int = 0) -> Checkpoint:
    """One update on records that are the same whatever the iteration's number."""
    batch = write_batch(root, checkpoint.iteration, ragged_rows(seed))
    return TRAIN.run(train_inputs(checkpoint, batch, **SETTINGS), root, path)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Checkpoint]:
    """A base model's folder, a run on it, and the run's checkpoint 1."""
    monkeypatch.setenv(RUNS, str(tmp_path / "runs"))
    folder, root = tmp_path / "models/small", tmp_path / "runs/first"
    make_base(folder)
    root.mkdir(parents=True)
    write_record(root, RunRecord(config={"name": "first", "iterations": 9}, versions={}))
    return folder, root, train(root, start(root, folder), layout.checkpoint(1))


def fork(root: Path, folder: Path, name: str, *, with_optimizer: bool) -> tuple[Path, Checkpoint]:
    """A fork's folder and its checkpoint 0."""
    asked = ForkInputs(run=root.name, iteration=1, with_optimizer=with_optimizer, source=str(root), folder=root)
    new = make_run(asked, name)
    return new, start(new, folder, origin_of(new))


def weights_of(root: Path, checkpoint: Checkpoint) -> bytes:
    return (root / checkpoint.path / WEIGHTS).read_bytes()


def test_a_fork_goes_on_as_its_origin_would(trained: tuple[Path, Path, Checkpoint]) -> None:
    folder, root, last = trained
    # The shuffle depends on the iteration's number, so the origin goes on under the fork's.
    as_the_fork_counts = last.model_copy(update={"iteration": 0})
    stayed = train(root, as_the_fork_counts, "checkpoints/again", seed=1)

    new, first = fork(root, folder, "kept", with_optimizer=True)
    assert (first.iteration, first.step, first.base_model) == (0, last.step, layout.BASE)
    assert weights_of(new, first) == weights_of(root, last)
    went_on = train(new, first, layout.checkpoint(1), seed=1)
    for name in (WEIGHTS, "optimizer.pt", "scheduler.pt", "trainer_state.json", PROBE):
        assert (new / went_on.path / name).read_bytes() == (root / stayed.path / name).read_bytes(), name

    anew, first = fork(root, folder, "anew", with_optimizer=False)
    assert (first.step, weights_of(anew, first)) == (0, weights_of(root, last))
    assert sorted(path.name for path in (anew / first.path).glob("*.pt*")) == []
    restarted = train(anew, first, layout.checkpoint(1), seed=1)
    assert restarted.step == 1
    before, one, other = (load_file(r / c.path / WEIGHTS) for r, c in ((root, last), (new, went_on), (anew, restarted)))
    differences = {name: float((one[name] - other[name]).abs().max()) for name in before}
    assert max(differences.values()) > 1e-3, "Adam's first step is another than its second"
    # The reference of the KL is the base model and not the origin.
    assert went_on.metrics["kl"] == stayed.metrics["kl"] == pytest.approx(restarted.metrics["kl"], rel=1e-5)
    assert restarted.metrics["kl"] > 0


def test_the_probe_of_a_fork_tells_it_from_its_base(trained: tuple[Path, Path, Checkpoint]) -> None:
    folder, root, last = trained
    new, first = fork(root, folder, "second", with_optimizer=False)
    probes = [Probe.model_validate_json((r / c.path / PROBE).read_text()) for r, c in ((root, last), (new, first))]
    for then, now in zip(*(probe.sequences for probe in probes), strict=True):
        assert now.previous is None
        assert (now.token_ids, now.logprobs, now.base) == (
            then.token_ids,
            pytest.approx(then.logprobs, abs=1e-5),
            pytest.approx(then.base, abs=1e-5),
        )
        assert now.logprobs != pytest.approx(now.base, abs=1e-3)


def test_a_run_whose_model_lies_elsewhere_goes_on_bit_for_bit(
    trained: tuple[Path, Path, Checkpoint], tmp_path: Path
) -> None:
    folder, root, last = trained
    moved = tmp_path / "other/disk/run"
    shutil.copytree(root, moved, symlinks=True)
    stayed = train(root, last, layout.checkpoint(2), seed=1)
    folder = folder.rename(tmp_path / "other/disk/model")
    link_base(moved, folder, digest_of_model(folder))
    assert start(moved, folder).path == layout.checkpoint(0), "it is there, from the same inputs"
    assert train(moved, last, layout.checkpoint(2), seed=1) == stayed
    for file in moved.glob("checkpoints/*/*"):
        assert str(tmp_path).encode() not in file.read_bytes(), file
