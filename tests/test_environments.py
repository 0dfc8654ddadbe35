"""The contract of every environment that comes with the project, and how an own one is loaded.

A new file in environments/ is held to the contract without a word here.
"""

import asyncio
import json
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from environment_fixtures import gateway, play

import environments
from environments import Message, Result, Split, Task, UnknownEnvironment
from environments.base import RequestRefused

LEFT_OUT = {"reasoning_gym_tasks": "reasoning_gym"}
"""Packages that need a compiler, so that `make setup` leaves them out."""
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not find_spec(LEFT_OUT.get(name, "environments")), reason="left out"))
    for name in environments.available()
]
SPLITS: tuple[Split, Split] = ("train", "test")
MOST_TASKS = 512
GARBAGE = {
    "nothing": None,
    "empty": "",
    "space": " \n\t",
    "huge": "a1 " * 100_000,
    "unicode": "🃏\u202e\x00ﬃ\ud7ff",
    "markup": "<move><move></move>%s{}\\",
    "json": '{"name": null, "arguments": []}',
}


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_always_the_same(name: str) -> None:
    for split in SPLITS:
        tasks = environments.load(name).tasks(split)
        assert tasks, split
        assert list(tasks) == list(environments.load(name).tasks(split))
        assert all(Task.model_validate_json(task.model_dump_json()) == task for task in tasks[:50])


@pytest.mark.parametrize("name", NAMES)
def test_no_task_is_in_both_splits(name: str) -> None:
    train, test = (environments.load(name).tasks(split) for split in SPLITS)
    ids = [task.id for task in [*train, *test]]
    assert len(ids) == len(set(ids))
    contents = [{json.dumps([task.seed, task.data], sort_keys=True) for task in split} for split in (train, test)]
    assert not contents[0] & contents[1]


@pytest.mark.parametrize("name", NAMES)
def test_equal_play_of_a_task_is_worth_the_same(name: str) -> None:
    environment = environments.load(name)
    [player, *_] = environment.players()
    for task in environment.tasks("train")[:8]:
        results = [play(environment, task, seeded(player.act, task)) for _ in range(2)]
        assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_players_pin_the_reward(name: str) -> None:
    environment = environments.load(name)
    players = environment.players()
    assert {player.name for player in players} >= {"best", "worst"}
    tasks = environment.tasks("test")[:MOST_TASKS]
    for player in players:
        mean = fmean(play(environment, task, seeded(player.act, task)).reward for task in tasks)
        low, high = player.reward
        assert low - 1e-9 <= mean <= high + 1e-9, f"{player.name}: {mean}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_has_a_reward(name: str, garbage: str) -> None:
    environment = environments.load(name)
    for task in environment.tasks("train")[:4]:
        result = play(environment, task, lambda messages: GARBAGE[garbage])
        assert Result.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_have_a_reward(name: str) -> None:
    environment, random = environments.load(name), Random(0)
    for task in environment.tasks("train")[:50]:
        result = play(environment, task, lambda messages: random.randbytes(random.randrange(40)).decode("latin-1"))
        assert isinstance(result, Result)


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_conversations(name: str) -> None:
    environment = environments.load(name)
    some = list(islice(environment.demonstrations(Random(1)), 20))
    assert some == list(islice(environment.demonstrations(Random(1)), 20)), "equal seeds, equal demonstrations"
    assert some != list(islice(environment.demonstrations(Random(2)), 20))
    for messages in some:
        assert {message["role"] for message in messages} <= {"system", "user", "assistant", "tool"}
        assert messages[-1]["role"] == "assistant"
        json.dumps(messages)


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_show_the_tools_that_rollouts_offer(name: str) -> None:
    environment, offered = environments.load(name), list[Any]()

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        offered.append(request.get("tools", []))
        raise RequestRefused(400, "seen")

    with gateway().open(complete) as policy, suppress(Exception):  # however the agent takes it
        asyncio.run(environment.rollout(environment.tasks("train")[0], policy))
    assert offered[0] == list(environment.demonstrated_tools())


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_begin_as_rollouts_do(name: str) -> None:
    environment = environments.load(name)
    demonstrated = {messages[0]["content"] for messages in islice(environment.demonstrations(Random(1)), 50)}
    seen: list[str] = []
    for task in environment.tasks("train")[:4]:
        play(environment, task, lambda messages: seen.append(messages[0]["content"]))
    assert set(seen) <= demonstrated


def seeded(act: Callable[[Sequence[Message], Random], str], task: Task) -> Callable[[Sequence[Message]], str]:
    random = Random(f"player/{task.id}")
    return lambda messages: act(messages, random)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own package, with an environment, an agent and its tasks."""
    (tmp_path / "own_agents.py").write_text(
        textwrap.dedent("""
        from environments import Environment, Result, Task

        class Riddles(Environment):
            difficulty: int = 1

            def tasks(self, split):
                return [Task(id=f"{split}-{self.difficulty}")]

            async def rollout(self, task, policy):
                return Result(reward=self.difficulty)

        async def number(task, policy):
            reply = await policy.chat([{"role": "user", "content": task.data["question"]}])
            return len(reply["content"])

        async def result(task, policy):
            return Result(reward=0.5, metrics={"seed": task.seed})

        def not_async(task, policy):
            return 1.0

        constant = 1
        """)
    )
    (tmp_path / "broken_agents.py").write_text("import os\nasync def agent(task policy): ...\n")
    (tmp_path / "raising_agents.py").write_text("1 / 0\n")
    (tmp_path / "poor_agents.py").write_text("import no_such_library\n")
    rows = [
        {"id": "a", "question": "?", "seed": 4},
        {"id": "b", "question": "!", "split": "test", "data": {"level": 2}},
        {"id": 3, "question": ".", "split": "train"},
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_environment_of_ones_own_is_loaded_with_its_options(package: Path) -> None:
    environment = environments.load("own_agents:Riddles", difficulty=3)
    [task] = environment.tasks("test")
    assert play(environment, task, lambda messages: "").reward == 3


def test_a_coroutine_and_a_file_of_tasks_are_an_environment(package: Path) -> None:
    environment = environments.load("own_agents:number", file=package / "tasks.jsonl")
    train, test = environment.tasks("train"), environment.tasks("test")
    assert [task.id for task in train] == ["a", "3"]
    assert train[0] == Task(id="a", seed=4, data={"question": "?"})
    assert test == [Task(id="b", data={"question": "!", "level": 2})]
    assert play(environment, train[0], lambda messages: "four").reward == 4
    environment = environments.load("own_agents:result", file=str(package / "tasks.jsonl"))
    assert play(environment, train[0], lambda messages: "").metrics == {"seed": 4}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tic_tac_to", {}, r"no environment 'tic_tac_to': tried environments/tic_tac_to.py; there are .*tic_tac_toe"),
        ("base", {}, "no environment 'base'"),
        ("_client", {}, "no environment '_client'"),
        ("tic_tac_toe", {"play": "X"}, "option 'play': Extra inputs are not permitted"),
        ("tic_tac_toe", {"train_tasks": "many"}, r"option 'train_tasks': .*valid integer.*\(got 'many'\)"),
        (
            "nowhere.agents:Agent",
            {},
            "there is no module 'nowhere' in .*, on PYTHONPATH or in",
        ),
        ("own_agents:Riddle", {}, "own_agents has no 'Riddle'; it has .*Riddles"),
        ("own_agents:Riddles", {"difficult": 1}, "option 'difficult'"),
        ("own_agents:not_async", {}, r"neither .*: write `async def not_async\(task, policy\)`"),
        ("broken_agents:agent", {}, "broken_agents.py:2: SyntaxError: invalid syntax"),
        ("raising_agents:agent", {}, "raising_agents.py:1: ZeroDivisionError: division by zero"),
        ("poor_agents:agent", {}, "poor_agents imports 'no_such_library', which is not installed in"),
        ("program", {"file": "tasks.jsonl"}, "option 'command': Field required"),
        ("program", {"file": "tasks.jsonl", "command": []}, "option 'command'"),
        ("own_agents:constant", {}, "neither"),
        ("own_agents:number", {}, "option 'file': Field required$"),
    ],
)
def test_errors_of_loading_say_what_was_tried(package: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownEnvironment, match=message) as error:
        environments.load(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't read the tasks in .*tasks.jsonl: No such file"),
        ("{", "tasks.jsonl:1 is not JSON"),
        ('{"id": "a"}\n["b"]', "tasks.jsonl:2 is not a task like"),
        ('{"name": "a"}', "tasks.jsonl:1 is not a task"),
        ('{"id": "a", "seed": "x"}', r"tasks.jsonl:1.*seed"),
        ('{"id": "a", "split": "dev"}', r"tasks.jsonl:1.*split.*'dev'"),
        ('{"id": "a"}\n{"id": "a", "split": "test"}', "tasks.jsonl has the id 'a' twice"),
        ("\n", "tasks.jsonl has no tasks"),
        ('{"id": "a", "data": [1]}', "tasks.jsonl:1.*data"),
    ],
)
def test_errors_in_a_file_of_tasks_name_the_line(package: Path, text: str | None, message: str) -> None:
    file = package / "tasks.jsonl"
    file.unlink() if text is None else file.write_text(text)
    environment = environments.load("own_agents:number", file=file)
    with pytest.raises(UnknownEnvironment, match=message):
        environment.tasks("train")
