"""Making room: what goes, what never does, that a run goes on afterwards, and that a kill leaves nothing half-gone."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flow_fixtures import Steps, config_of
from prune_fixtures import Everything, History, going, silent

from flows.nights import nightly
from flows.train import train
from steps import prune as pruning
from steps.common import layout
from steps.common.artifacts import check_files
from steps.common.errors import CorruptArtifact, PrunedArtifact
from steps.common.query import select
from steps.common.retention import Policy, Verdict
from steps.common.rewind import Rewind, rescore, rewind
from steps.common.runs import locked
from steps.common.status import damages, pruned, status_of
from steps.prune import prune


def reasons(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.path: verdict.reason for verdict in verdicts}


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Six checkpoints, of which the third was never evaluated and the second is the best."""
    history = History(tmp_path / "run")
    for checkpoint, reward in zip(history.go_on(5), (0.1, 0.9, None, 0.3, 0.8, 0.5), strict=True):
        if reward is not None:
            history.evaluate(checkpoint, reward)
    return history


def test_nothing_goes_unless_a_rule_is_set(history: History) -> None:
    before, said = Everything.in_folder(history.root), []
    assert prune(history.root, Policy(), None, said.append, dry_run=False) == []
    assert said == ["nothing to prune"]
    assert Everything.in_folder(history.root) == before


def test_every_folder_is_told_with_its_size_and_the_reason(history: History) -> None:
    said: list[str] = []
    policy = Policy(last=2, best=1, every=3)
    found = prune(history.root, policy, None, said.append, dry_run=True)
    assert reasons(found) == {
        "checkpoints/0000": "what a first champion has to beat",
        "checkpoints/0001": "among the best 1",
        "checkpoints/0002": "never evaluated",
        "checkpoints/0003": "one of every 3",
        "checkpoints/0004": "among the last 2",
        "checkpoints/0005": "the newest",
    }
    assert [line.split()[:2] for line in said[:-1]] == [["stays", path] for path in reasons(found)]
    history.evaluate(history.go_on(5)[2], 0.2)
    freed = sum(file.bytes for file in history.manifest("checkpoints/0002").files.values())
    found = prune(history.root, policy, None, said.append, dry_run=True)
    assert going(found) == ["checkpoints/0002"]
    assert [verdict.bytes for verdict in found if verdict.goes] == [freed]
    assert "goes   checkpoints/0002" in said[-5] and "not kept by last 2, best 1, every 3" in said[-5]
    assert said[-1] == f"1 folders would be pruned, {freed} B in all"
    assert all(history.is_whole(path) for path in reasons(found))


def test_what_is_pruned_stays_finished_and_says_so_where_its_files_are_needed(history: History) -> None:
    for path in ("iterations/0000/rollouts/000", "iterations/0000/batch", "iterations/0005/batch"):
        if (history.root / path).exists():
            history.age(path, 8)
    silent(history.root, Policy(last=1, every=5, rollout_days=7))
    assert pruned(history.root) == [
        *(f"checkpoints/{i:04d}" for i in (1, 2, 3, 4)),
        "iterations/0000/batch",
        "iterations/0000/rollouts/000",
    ]
    assert [path.name for path in (history.root / "checkpoints/0003").iterdir()] == ["manifest.json"]
    assert {damage for _, damage in damages(history.root)} == {None}
    with pytest.raises(PrunedArtifact, match=r"checkpoints/0003 was pruned on .*restore it from a backup"):
        check_files(history.root / "checkpoints/0003", history.manifest("checkpoints/0003"))
    before = Everything.in_folder(history.root)
    for target in (Rewind(iteration=3, step="train"), Rewind(iteration=0, step="collate")):
        with pytest.raises(PrunedArtifact, match="was pruned"):
            rewind(history.root, target)
    (history.root / "iterations/0000/groups").mkdir()
    with pytest.raises(PrunedArtifact, match=r"rollouts/000 was pruned"):
        rescore(history.root, 0)
    (history.root / "iterations/0000/groups").rmdir()
    assert Everything.in_folder(history.root) == before
    history.check_resumable()


def test_a_step_refuses_inputs_whose_files_are_gone(history: History) -> None:
    checkpoints = history.go_on(5)
    silent(history.root, Policy(last=1))
    third = checkpoints[3]
    assert history.play(third)  # it is there
    with pytest.raises(PrunedArtifact, match="checkpoints/0002 was pruned"):
        history.evaluate(checkpoints[2], 0.3)


def test_what_is_served_stays(history: History) -> None:
    with locked(history.root / layout.DAY / "0003"):
        verdicts = silent(history.root, Policy(last=1))
    assert reasons(verdicts)["checkpoints/0003"] == "served at the moment"
    assert going(silent(history.root, Policy(last=1))) == ["checkpoints/0003"]


def test_a_killed_prune_is_ended_by_the_next(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("iterations/0001/batch", "iterations/0001/rollouts/001"):
        history.age(path, 2)
    policy = Policy(last=2, rollout_days=1)
    copy = Everything.in_folder(history.root)
    expected = going(silent(history.root, policy, dry_run=True))
    for deletions in (0, 1, 2, 9):
        left = deletions

        def unlink(path: Path, missing_ok: bool = False, original: Callable[..., None] = Path.unlink) -> None:
            nonlocal left
            if "run" in path.parts and not path.name.startswith("."):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            original(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            silent(history.root, policy)
        monkeypatch.undo()
        for path in expected:  # none that looks whole, and is not
            manifest = history.manifest(path)
            assert manifest.pruned or all((history.root / path / name).exists() for name in manifest.files)
        silent(history.root, policy)
        assert not [path for path in expected if history.is_whole(path)]
        assert going(silent(history.root, Policy())) == []
        for name, content in copy.files.items():
            (history.root / name).parent.mkdir(exist_ok=True)
            (history.root / name).write_bytes(content)


def test_what_others_have_put_there_stays_and_links_are_not_followed(history: History, tmp_path: Path) -> None:
    root, elsewhere = history.root, tmp_path / "elsewhere"
    (root / "checkpoints/0001/notes").mkdir()
    for mine in ("0001/mine.txt", "0001/notes/mine.txt", "0002/data/mine.txt"):
        (root / "checkpoints" / mine).write_text("precious")
    (root / "checkpoints/0003").rename(elsewhere)
    (root / "checkpoints/0003").symlink_to(elsewhere)
    (tmp_path / "large").write_bytes((root / "checkpoints/0004/small").read_bytes())
    (root / "checkpoints/0004/small").unlink()
    (root / "checkpoints/0004/small").symlink_to(tmp_path / "large")
    before = Everything.in_folder(tmp_path)
    verdicts = silent(root, Policy(last=1))
    assert going(verdicts) == ["checkpoints/0001", "checkpoints/0002"]
    assert {reasons(verdicts)[f"checkpoints/000{i}"] for i in (3, 4)} == {"behind a symbolic link"}
    gone = before.files.keys() - Everything.in_folder(tmp_path).files.keys()
    assert gone == {f"run/checkpoints/000{i}/{name}" for i in (1, 2) for name in ("data/file", "small")}

    (root / "checkpoints").rename(tmp_path / "other disk")
    (root / "checkpoints").symlink_to(tmp_path / "other disk")
    assert not going(silent(root, Policy(last=1)))


def test_a_manifest_that_names_files_of_others_deletes_none(history: History, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    manifest = history.root / "checkpoints/0001/manifest.json"
    manifest.write_text(manifest.read_text().replace('"small"', '"../../../precious"'))
    assert "checkpoints/0001" not in going(silent(history.root, Policy(last=1)))
    assert (tmp_path / "precious").exists()


def test_a_damaged_manifest_stops_it_before_anything_is_deleted(history: History) -> None:
    (history.root / "checkpoints/0004/manifest.json").write_text("{")
    before = Everything.in_folder(history.root)
    with pytest.raises(CorruptArtifact, match=r"0004/manifest\.json is not a manifest"):
        silent(history.root, Policy(last=1))
    assert Everything.in_folder(history.root) == before


def set_aside(history: History, days: float) -> Path:
    """Goes back to iteration 3, so many days ago."""
    aside, _ = rewind(history.root, Rewind(iteration=3, step="train"))
    then = datetime.now(UTC) - timedelta(days=days)
    return aside.rename(aside.with_name(then.strftime("%Y-%m-%dT%H%M%S.%fZ")))


def test_what_a_rewind_has_set_aside_goes_but_for_its_record(history: History) -> None:
    aside = set_aside(history, 9)
    groups = aside / "iterations/0005/rollouts/.001.0123456789ab.groups"
    groups.mkdir(parents=True)
    (groups / "0000.parquet").write_bytes(b"...")
    policy, path = Policy(superseded_days=7), aside.relative_to(history.root).as_posix()
    assert reasons(silent(history.root, Policy(superseded_days=10))) == {path: "younger than 10 days"}
    assert going(silent(history.root, policy, dry_run=True)) == [path]
    assert going(silent(history.root, policy)) == [path]
    assert [file.name for file in aside.iterdir()] == ["rewind.json"]
    assert silent(history.root, policy) == []
    history.check_resumable()


def test_nothing_that_was_set_aside_comes_back_half_deleted(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = set_aside(history, 9)

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pruning.shutil, "rmtree", killed)
        silent(history.root, Policy(superseded_days=7))
    assert not list(aside.rglob("[0-9]*/manifest.json"))
    assert len(going(silent(history.root, Policy(superseded_days=7)))) == 1
    assert [file.name for file in aside.iterdir()] == ["rewind.json"]


def test_what_comes_back_or_is_not_ours_stays_aside(history: History) -> None:
    aside = set_aside(history, 9)
    (aside / "checkpoints/0005/mine.txt").write_text("precious")
    (history.root / "superseded/mine").mkdir()
    before, policy = Everything.in_folder(history.root), Policy(superseded_days=7)
    assert [verdict.reason for verdict in silent(history.root, policy)] == [
        "checkpoints/0005 holds files that are not its own"
    ]
    (aside / "checkpoints/0005/mine.txt").rename(aside / "mine.txt")
    (aside / "rewind.json").rename(history.root / "rewind.json")
    assert [verdict.reason for verdict in silent(history.root, policy)] == ["its rewind was killed, and it comes back"]
    assert len(Everything.in_folder(history.root).files) == len(before.files)
    (history.root / "rewind.json").rename(aside / "rewind.json")
    silent(history.root, policy)
    assert sorted(file.name for file in aside.iterdir()) == ["mine.txt", "rewind.json"]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Prefect's own clients are not closed
def test_a_pruned_run_trains_on_and_does_nothing_again(steps: Steps, runs: Path, tmp_path: Path) -> None:
    rules = ["retention.last=1", "retention.rollout_days=0"]
    train(config_of(tmp_path, "iterations=3", "evaluate.every=3"))
    assert pruned(runs / "night") == []
    silent(runs / "night", Policy(last=1, rollout_days=0))
    gone = pruned(runs / "night")
    assert {path for path in gone if path.startswith("checkpoints")} == {"checkpoints/0001", "checkpoints/0002"}
    assert len([path for path in gone if path.startswith("iterations")]) == 3 * 3
    assert len(select(runs / "night", "FROM trajectories")) == len(select(runs / "night", "FROM batch")) == 0
    assert len(select(runs / "night", "FROM groups")) == 3 * 8

    done = set(steps.made)
    steps.made.clear(), steps.served.clear()
    train(config_of(tmp_path, "iterations=5", *rules))  # now also asks for evaluations of what was pruned
    assert not done & set(steps.made)
    assert [path for path in steps.made if path.startswith("checkpoints")] == ["checkpoints/0004", "checkpoints/0005"]
    assert not {"checkpoints/0001", "checkpoints/0002"} & set(steps.served)
    assert set(pruned(runs / "night")) > {"checkpoints/0003", "checkpoints/0004", "iterations/0004/batch"}
    assert status_of(runs / "night").state == "finished"

    steps.made.clear()
    nightly(config_of(tmp_path, *rules), 1)
    assert [path for path in steps.made if path.startswith("checkpoints")] == ["checkpoints/0006"]
