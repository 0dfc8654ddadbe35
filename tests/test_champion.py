"""The champion: the test that promotes, the history that tells who it is, and the way back."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import pytest
from flow_fixtures import Steps, config_of
from test_cli import nightschool
from test_nights import in_a_flow

from flows.champion import promote
from flows.nights import nightly
from steps.common import layout
from steps.common.artifacts import Champion, Checkpoint
from steps.common.champion import champion, history, line
from steps.common.errors import InvalidInputs
from steps.common.paired import compare, fewest, lower_bound
from steps.common.rewind import Rewind, rewind
from steps.common.runs import RunInUse, RunRecord, locked, write_record
from steps.common.status import status_of
from steps.common.step import Inputs, Step
from steps.rollback import roll_back

# --- the test


def test_the_bound_is_the_quantile_of_all_resamples() -> None:
    differences = [0.5, -0.25, 1.0, 0.0, 0.75]
    means = sorted(fmean(sample) for sample in itertools.product(differences, repeat=5))
    assert len(means) == 3125
    for confidence in (0.8, 0.9, 0.95):
        around = [means[int((1 - confidence + shift) * len(means))] for shift in (-0.01, 0.01)]
        assert around[0] <= lower_bound(differences, confidence) <= around[1]


def test_the_bound_is_that_of_the_normal_distribution_for_many_tasks() -> None:
    source = random.Random(1)
    differences = [source.gauss(0.1, 1.0) for _ in range(400)]
    error = pstdev(differences) / math.sqrt(400)
    for confidence in (0.9, 0.95):
        normal = fmean(differences) - NormalDist().inv_cdf(confidence) * error
        assert lower_bound(differences, confidence) == pytest.approx(normal, abs=0.1 * error)


def test_equals_are_promoted_as_often_as_the_confidence_says() -> None:
    source = random.Random(2)
    trials = [[source.choice([-1.0, 0.0, 0.0, 1.0]) for _ in range(60)] for _ in range(150)]
    promoted = sum(lower_bound(trial, 0.9) > 0 for trial in trials)
    assert promoted / 150 == pytest.approx(0.1, abs=3 * math.sqrt(0.09 / 150))


def test_a_task_that_failed_on_either_side_is_left_out() -> None:
    test = compare({"a": 1.0, "b": None, "c": 0.5, "d": 1.0}, {"a": 0.0, "b": 1.0, "c": None, "d": 1.0}, 0.95, 0.0)
    assert test
    assert (test.pairs, test.different, test.left_out) == (2, 1, 2)
    assert (test.challenger, test.incumbent, test.difference) == (1.0, 0.5, 0.5)
    assert compare({"a": None}, {"a": 1.0}, 0.95, 0.0) is None


@pytest.mark.parametrize("confidence", [0.5, 0.75, 0.9, 0.95, 0.99])
def test_enough_tasks_are_those_with_which_a_sign_test_could_be_sure(confidence: float) -> None:
    enough = fewest(confidence)
    assert 0.5**enough <= 1 - confidence + 1e-12
    assert enough == 2 or 0.5 ** (enough - 1) > 1 - confidence


# --- the history


def crown(root: Path, number: int, decision: str, new: Checkpoint, old: Checkpoint) -> None:
    """Writes a decision into the history."""
    fields = {"decision": decision, "checkpoint": new.model_dump(), "predecessor": old.model_dump()}
    step = Step("promote", Inputs, Champion, lambda inputs, workspace: {**fields, "reason": "so", "test": None})
    step.run(Inputs(), root, layout.champion(number))


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Checkpoint]:
    """Five checkpoints of the run `tmp_path`."""

    def make(iteration: int) -> Checkpoint:
        def work(inputs: object, workspace: object) -> dict[str, object]:
            (workspace.out / "adapter").write_text(str(iteration))  # type: ignore[attr-defined]
            return {"iteration": iteration, "base_model": "model", "step": 1, "updated": True, "metrics": {}}

        return Step("train", Inputs, Checkpoint, work).run(Inputs(), tmp_path, layout.checkpoint(iteration))

    write_record(tmp_path, RunRecord(config={"iterations": 4}, versions={}))
    return [make(iteration) for iteration in range(5)]


def numbers(root: Path) -> list[int]:
    return [checkpoint.iteration for checkpoint in line(root)]


def test_the_champion_follows_from_the_history(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    zero, one, two, three, four = checkpoints
    assert (champion(tmp_path), numbers(tmp_path)) == (None, [])
    crown(tmp_path, 0, "kept", one, zero)
    assert champion(tmp_path) is None
    crown(tmp_path, 1, "promoted", two, zero)
    assert numbers(tmp_path) == [2, 0]
    crown(tmp_path, 2, "kept", three, two)
    crown(tmp_path, 3, "promoted", four, two)
    assert numbers(tmp_path) == [4, 2, 0]
    crown(tmp_path, 4, "rolled back", two, four)
    assert numbers(tmp_path) == [2, 0]
    crown(tmp_path, 5, "rolled back", four, two)  # forward again
    assert numbers(tmp_path) == [4, 2, 0]
    crown(tmp_path, 6, "rolled back", zero, four)
    assert numbers(tmp_path) == [0]
    assert champion(tmp_path) == 0


def test_a_champion_that_was_rewound_is_passed_over(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    zero, one, two, three, _ = checkpoints
    for number, (new, old) in enumerate([(one, zero), (two, one), (three, two)]):
        crown(tmp_path, number, "promoted", new, old)
    rewind(tmp_path, Rewind(iteration=2, step="train"))
    assert numbers(tmp_path) == [2, 1, 0]
    manifest = tmp_path / two.path / layout.MANIFEST
    manifest.write_text(manifest.read_text().replace(two.digest, "another"))
    assert numbers(tmp_path) == [1, 0]


def test_rolling_back_is_written_down_and_told(tmp_path: Path, checkpoints: list[Checkpoint]) -> None:
    zero, one, two, *_ = checkpoints
    for number, (new, old) in enumerate([(one, zero), (two, one)]):
        crown(tmp_path, number, "promoted", new, old)
    with locked(tmp_path):  # a night that is under way is not waited for
        assert nightschool("rollback", tmp_path).stdout == "champion  checkpoint 1\nbefore    checkpoint 2\n"
    assert history(tmp_path)[-1].reason == "asked for: checkpoint 2 gave way to checkpoint 1"
    assert nightschool("rollback", tmp_path, "--to", "2").stdout.startswith("champion  checkpoint 2\n")
    status = json.loads(nightschool("status", tmp_path, "--json").stdout)
    assert status["champion"] == 2
    assert status["last_decision"]["decision"] == "rolled back"
    assert "champion: checkpoint 2" in nightschool("status", tmp_path).stdout
    for _ in range(2):
        nightschool("rollback", tmp_path)
    assert (champion(tmp_path), len(history(tmp_path))) == (0, 6)
    with locked(tmp_path / layout.CHAMPIONS):
        assert "is in use by process" in nightschool("rollback", tmp_path, "--to", "2").stderr


@pytest.mark.parametrize(
    "crowned, asked, message",
    [
        ([], None, "has no champion, so nothing to roll back"),
        ([], 0, "has no champion, so nothing to roll back"),
        ([0], None, "checkpoint 0 is champion and has no predecessor to go back to"),
        ([1, 0], 1, "checkpoint 1 is champion already"),
        ([1, 0], 3, "checkpoint 3 never was champion, only 0, 1:"),
    ],
)
def test_there_must_be_something_to_go_back_to(
    tmp_path: Path, checkpoints: list[Checkpoint], crowned: Sequence[int], asked: int | None, message: str
) -> None:
    if crowned:
        crown(tmp_path, 0, "promoted", checkpoints[1], checkpoints[0])
    if crowned == [0]:
        crown(tmp_path, 1, "rolled back", checkpoints[0], checkpoints[1])
    with pytest.raises(InvalidInputs, match=message):
        roll_back(tmp_path, asked)
    failed = nightschool("rollback", tmp_path, *([] if asked is None else ["--to", str(asked)]))
    assert failed.returncode == 202
    assert len(failed.stderr.splitlines()) == 1


# --- nights

MONDAY, TUESDAY, WEDNESDAY, THURSDAY = (date(2026, 3, day) for day in range(2, 6))
WEAK, STRONG = [0.0] * 10 + [1.0] * 2, [0.0] * 5 + [1.0] * 7


@in_a_flow
def test_a_night_that_got_worse_is_not_promoted(steps: Steps, runs: Path, tmp_path: Path) -> None:
    config, root = config_of(tmp_path, "evaluate.tasks=12", "evaluate.every=100"), runs / "night"
    steps.held_out = {0: WEAK, 1: [*STRONG[:-1], None], 2: [None, *WEAK[1:]], 3: [1.0] * 12}

    nightly(config, 1, night=MONDAY)
    assert champion(root) == 1
    (first,) = history(root)
    assert first.decision == "promoted"
    assert first.reason == (
        "checkpoint 1 has 0.545 and checkpoint 0 has 0.0909 on 11 held-out tasks, 1 more failed for one of them: "
        "the difference is +0.455, with 95 % confidence at least +0.182 (paired bootstrap), above the margin of 0"
    )

    nightly(config, 1, night=TUESDAY)
    worse = history(root)[-1]
    assert (worse.decision, worse.checkpoint.iteration, champion(root)) == ("kept", 2, 1)
    assert worse.reason == (
        "checkpoint 2 has 0.1 and checkpoint 1 has 0.6 on 10 held-out tasks, 2 more failed for one of them: "
        "the difference is -0.5, with 95 % confidence at least -0.8 (paired bootstrap), not above the margin of 0"
    )
    assert steps.made.count("evaluations/0001") == 1
    assert status_of(root).last_decision.reason == worse.reason  # type: ignore[union-attr]

    nightly(config, 1, night=WEDNESDAY)
    assert champion(root) == 3
    assert nightschool("rollback", "night").returncode == 0
    nightly(config, 1, night=WEDNESDAY)  # tried again, it leaves the rollback alone
    assert (champion(root), len(history(root))) == (1, 4)

    promote(str(root))  # asked for, it does not
    promote(str(root), 2)
    assert (champion(root), len(history(root))) == (3, 6)
    promote(str(root), 2)  # the same once more adds nothing
    assert len(history(root)) == 6
    with pytest.raises(InvalidInputs, match="checkpoint 3 is the one that others have to beat"):
        promote(str(root))


@in_a_flow
def test_other_tasks_are_played_by_both(steps: Steps, runs: Path, tmp_path: Path) -> None:
    root = runs / "night"
    nightly(config_of(tmp_path), 1, night=MONDAY)
    assert history(root)[-1].reason == (
        "checkpoint 1 has 0.5 and checkpoint 0 has 0.5 on 3 held-out tasks: "
        "only 0 of them went differently, and 95 % confidence needs 5"
    )
    steps.held_out = {0: WEAK, 2: STRONG}
    steps.made.clear()
    harder = config_of(tmp_path, "evaluate.tasks=12", "promotion.confidence=0.9", "promotion.margin=0.6")
    nightly(harder, 1, night=TUESDAY)
    again = [path for path in steps.made if path.startswith("evaluations/0000-")]
    assert len(again) == 1 and "evaluations/0002" in steps.made
    kept = history(root)[-1]
    assert (kept.decision, kept.test.pairs, kept.test.margin) == ("kept", 12, 0.6)  # type: ignore[union-attr]
    assert "+0.417, with 90 % confidence at least +0.25" in kept.reason and "not above the margin of 0.6" in kept.reason
    with locked(root), pytest.raises(RunInUse):
        promote(str(root))
