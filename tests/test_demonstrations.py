"""The step `demonstrations`: what is gathered of each source, what is refused, and what a flow makes of it."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
from flow_fixtures import Steps, config_of
from run_fixtures import store_rollouts, trajectory

from environments import Environment, Task, TokenSequence, TrajectoryGroup
from flows.plan import Plan
from flows.train import train
from steps.common import layout
from steps.common.artifacts import Checkpoint, Demonstrations, read_artifact, read_manifest
from steps.common.errors import InvalidInputs
from steps.common.origin import Origin
from steps.common.report import notes_of
from steps.common.rewind import Rewind, rewind
from steps.common.runs import RUNS, RunRecord, write_record
from steps.common.settings import EnvironmentSettings
from steps.common.status import status_of
from steps.common.step import Inputs, Step
from steps.demonstrations import DEMONSTRATIONS, DemonstrationsInputs, ExampleSettings, demonstrations_of
from steps.examples.best import SEQUENCES
from steps.examples.chats import CHATS
from steps.group import GROUP, GroupInputs
from steps.initialize import InitializeInputs

GAME = EnvironmentSettings(name="tic_tac_toe")
BASE = ("model", "digest of the model")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}


def asked(root: Path, base: tuple[str, str | None] = BASE, **settings: Any) -> DemonstrationsInputs:
    return demonstrations_of(ExampleSettings(**settings), root, GAME, 0, base)


def gather(root: Path, **settings: Any) -> Demonstrations:
    return DEMONSTRATIONS.run(asked(root, **settings), root, layout.DEMONSTRATIONS)


def chats_in(root: Path) -> list[Any]:
    lines = (root / layout.DEMONSTRATIONS / CHATS).read_text().splitlines()
    return [json.loads(line) for line in lines]


class Silent(Environment):
    """Shows nothing."""


def test_demonstrations_are_the_environments_first(tmp_path: Path) -> None:
    made = gather(tmp_path, demonstrations=3)
    assert (made.source, made.examples, made.dropped) == ("environment", 3, {})
    wanted = list(islice(GAME.load().demonstrations(Random(0)), 3))
    assert [chat["messages"] for chat in chats_in(tmp_path)] == wanted


def test_an_environment_without_demonstrations_says_so(tmp_path: Path) -> None:
    silent = EnvironmentSettings(name="test_demonstrations:Silent")
    inputs = demonstrations_of(ExampleSettings(demonstrations=3), tmp_path, silent, 0, BASE)
    with pytest.raises(InvalidInputs, match=r"sft\.demonstrations: the environment .*:Silent has none"):
        DEMONSTRATIONS.run(inputs, tmp_path, layout.DEMONSTRATIONS)


def test_chats_are_checked_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"item": "é"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    lines: list[Any] = [
        CHAT,
        {"messages": CHAT["messages"][:1]},
        {"messages": []},
        {"messages": CHAT["messages"], "id": 7},
        {"messages": [{"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [said | {"tool_calls": [call | {"function": {"name": "find", "arguments": "[1"}}]}]},
    ]
    file.write_text("\n\n".join([*map(json.dumps, lines), "{"]))
    with pytest.raises(InvalidInputs) as refused:
        gather(tmp_path, chats=file)
    assert str(refused.value).replace(str(file), "FILE").splitlines() == [
        "FILE:3: no message is the assistant's: there is nothing to imitate",
        "FILE:5: messages: List should have at least 1 item after validation, not 0",
        "FILE:7: id: Extra inputs are not permitted",
        "FILE:9: an assistant's message has neither content nor tool_calls",
        "FILE:11: messages.0.content: Input should be a valid string",
        "FILE:13: messages.0.role: Input should be 'system', 'developer', 'user', 'assistant' or 'tool'",
        "FILE:15: messages.0.tool_calls.0.function.arguments: Expecting ',' delimiter: line 1 column 3 (char 2)",
        "FILE:17: Invalid JSON: EOF while parsing an object at line 1 column 1",
    ]
    file.write_text("{}\n" * 12)
    with pytest.raises(InvalidInputs, match=r"and 2 more$"):
        gather(tmp_path, chats=file)
    file.write_text("")
    with pytest.raises(InvalidInputs, match="the file is empty"):
        gather(tmp_path, chats=file)

    tools = [{"type": "function", "function": {"name": "find"}}]
    file.write_text(json.dumps({"messages": [said], "tools": tools}))
    assert gather(tmp_path, chats=file).examples == 1
    [chat] = chats_in(tmp_path)
    assert chat["messages"][0]["content"] == "" and chat["tools"] == tools
    assert chat["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"item": "é"}, "as templates take them"


def test_a_file_of_chats_counts_by_its_content_alone(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    with pytest.raises(InvalidInputs, match=r"can't read the chats in .*No such file"):
        asked(tmp_path, chats=file)
    file.write_text(json.dumps(CHAT))
    made = gather(tmp_path, chats=file)
    assert gather(tmp_path, chats=file.rename(tmp_path / "elsewhere.jsonl")) == made
    file.write_text(json.dumps(CHAT) + "\n\n")
    with pytest.raises(InvalidInputs, match=r"made from other inputs \(source.sha256"):
        gather(tmp_path, chats=file)
    file.unlink()
    assert gather(tmp_path, chats=file) == made, "what was gathered from it is still right"


def tokens(task: int, attempt: int) -> TokenSequence:
    return TokenSequence([9, 9, task, attempt], [False, False, True, True], [0.0, 0.0, -1.0, -1.0])


REWARDS: list[list[float | None]] = [[0.0, 1.0, 1.0], [0.5, 0.5, 0.5], [None, None, None], [None, 0.1, 0.2]]


def play(root: Path, iteration: int, rewards: list[list[float | None]] = REWARDS) -> None:
    """An iteration in two shards. The attempts at the first task have two sequences each."""
    groups = [
        TrajectoryGroup(
            Task(id=f"task-{t}"),
            [
                trajectory(f"task-{t}", a, reward, tokens(t, a), *([tokens(8, a)] if t == 0 else []))
                for a, reward in enumerate(row)
            ],
        )
        for t, row in enumerate(rewards)
    ]
    rollouts = [store_rollouts(root, groups[half::2], iteration, half) for half in range(2)]
    GROUP.run(GroupInputs(iteration=iteration, rollouts=rollouts, environment=GAME), root, layout.groups(iteration))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one iteration."""
    monkeypatch.setenv(RUNS, str(tmp_path))
    root = tmp_path / "played"
    facts = {"iteration": 0, "base_model": BASE[0], "base_digest": BASE[1], "step": 0, "updated": False, "metrics": {}}
    Step("initialize", Inputs, Checkpoint, lambda inputs, workspace: facts).run(Inputs(), root, layout.checkpoint(0))
    write_record(root, RunRecord(config={"name": "played", "iterations": 1}, versions={}))
    play(root, 0)
    return root


def best(root: Path) -> list[tuple[Any, ...]]:
    frame = pl.read_parquet(root / layout.DEMONSTRATIONS / SEQUENCES)
    return frame.select("task_id", "attempt", "token_ids", "mask", "reward").rows()


def test_the_best_attempt_of_each_group_is_taken_token_by_token(played: Path, tmp_path: Path) -> None:
    root = tmp_path / "new"
    made = gather(root, best_of="played")
    assert (made.source, made.examples, made.dropped) == ("best_of", 2, {"all_alike": 1, "all_failed": 1})
    mask = [False, False, True, True]
    assert best(root) == [
        ("task-0", 1, [9, 9, 0, 1], mask, 1.0),
        ("task-0", 1, [9, 9, 8, 1], mask, 1.0),
        ("task-3", 2, [9, 9, 3, 2], mask, 0.2),
    ]


def test_with_a_least_reward_it_alone_decides(played: Path, tmp_path: Path) -> None:
    made = gather(tmp_path / "new", best_of="played", min_reward=0.5)
    assert (made.examples, made.dropped) == (2, {"all_failed": 1, "below_min_reward": 1})
    assert [(task, attempt) for task, attempt, *_ in best(tmp_path / "new")][1:] == [("task-0", 1), ("task-1", 0)]
    with pytest.raises(InvalidInputs, match=r"no group of .*has an attempt .*: 1 all_failed, 3 below_min_reward"):
        gather(tmp_path / "other", best_of="played", min_reward=2)


def test_the_same_tokens_are_taken_once_and_what_was_pruned_is_counted(played: Path, tmp_path: Path) -> None:
    play(played, 1, REWARDS[:1])
    play(played, 2)
    manifest = played / "iterations/0002/rollouts/001/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"pruned": "2026-03-01T00:00:00Z"}))
    made = gather(tmp_path / "new", best_of="played")
    assert (made.examples, made.dropped) == (2, {"all_alike": 1, "all_failed": 1, "pruned": 4, "repeated": 1})


def test_what_was_gathered_stays_while_its_run_goes_on(played: Path, tmp_path: Path) -> None:
    made = gather(tmp_path / "new", best_of="played")
    play(played, 1)
    assert gather(tmp_path / "new", best_of=str(played)) == made
    played.rename(tmp_path / "gone")
    assert gather(tmp_path / "new", best_of="played") == made
    for changed in ({"best_of": "played", "min_reward": 0.1}, {"demonstrations": 2}):
        with pytest.raises(InvalidInputs, match="made from other inputs"):
            gather(tmp_path / "new", **changed)
    with pytest.raises(InvalidInputs, match="there is no run 'played'"):
        gather(tmp_path / "other", best_of="played")


def test_a_run_whose_tokens_would_mean_something_else_is_refused(played: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs, match=r"played as they are, but its base model is model \(digest digest of th\)"):
        DEMONSTRATIONS.run(asked(tmp_path, ("model", "other"), best_of="played"), tmp_path, layout.DEMONSTRATIONS)
    (played / "iterations/0000/groups/manifest.json").unlink()
    with pytest.raises(InvalidInputs, match="has no groups yet"):
        gather(tmp_path, best_of="played")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "give one of"),
        ({"demonstrations": 3, "best_of": "x"}, "give one of"),
        ({"demonstrations": 3, "min_reward": 1.0}, "sft.min_reward goes with sft.best_of"),
    ],
)
def test_settings_name_one_source(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ExampleSettings(**given)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Prefect's own clients are not closed
@pytest.mark.timeout(200)
def test_a_run_starts_from_examples(steps: Steps, runs: Path, tmp_path: Path) -> None:
    file, root = tmp_path / "chats.jsonl", runs / "night"
    file.write_text(json.dumps(CHAT))
    settings = [f"sft.chats='{file}'", "iterations=1"]
    steps.raises["checkpoints/0000"] = [OSError("killed")]
    train(config_of(tmp_path, *settings))
    assert steps.made[:3] == ["model", "checkpoints/0000", "checkpoints/0000"]
    manifest = read_manifest(root / layout.checkpoint(0))
    assert manifest and manifest.step == "sft"
    digest = read_artifact(Demonstrations, root, layout.DEMONSTRATIONS).digest
    assert manifest.inputs["demonstrations"]["digest"] == digest
    assert manifest.inputs["settings"]["epochs"] == 1 and "chats" not in manifest.inputs["settings"]

    told = "started from 1 examples (chats), loss 0.500, token accuracy 0.75; left out: 1 too_long"
    assert list(notes_of(status_of(root))) == [told]
    assert told in (root / layout.REPORT).read_text()

    steps.made.clear()
    file.unlink()
    train(config_of(tmp_path, *settings))
    assert steps.made == []
    with pytest.raises(InvalidInputs, match=r"settings.epochs: 1 then, 2 now"):
        train(config_of(tmp_path, *settings, "sft.epochs=2"))
    with pytest.raises(InvalidInputs, match="made from other inputs"):
        train(config_of(tmp_path, "iterations=1"))
    rewind(root, Rewind(iteration=0, step="sft"))
    assert (root / layout.DEMONSTRATIONS).exists()
    assert not (root / layout.checkpoint(0)).exists()
    train(config_of(tmp_path, *settings))
    assert steps.made == ["checkpoints/0000"], "what follows from it comes back"
    rewind(root, Rewind(iteration=0, step="demonstrations"))
    assert not (root / layout.DEMONSTRATIONS).exists()
    with pytest.raises(InvalidInputs, match="can't read the chats"):
        train(config_of(tmp_path, *settings))
    file.write_text(json.dumps(CHAT))
    train(config_of(tmp_path, *settings))
    assert steps.made == ["checkpoints/0000"]


def test_a_fork_does_not_imitate_its_origins_examples_again(tmp_path: Path) -> None:
    plan = Plan(config_of(tmp_path, "sft.demonstrations=3"))
    checkpoint = Checkpoint(path="x", digest="x", iteration=2, base_model="model", step=2, updated=True, metrics={})
    given: dict[str, Any] = {"path": "origin", "digest": "x", "run": "first", "checkpoint": checkpoint, "lora": {}}
    for learnt, again in ((None, True), ({"demonstrations": 3}, False), ({"demonstrations": 4}, True)):
        origin = Origin.model_validate(given | {"with_optimizer": True, "sft": learnt})
        first = InitializeInputs(base_model="model", origin=origin)
        assert (plan.demonstrations(first, tmp_path) is not None) == again
        assert ("sft" in first.identity()["origin"]) == (learnt is not None), "older forks stay what they are"
