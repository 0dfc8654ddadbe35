"""The agent with the tools of an MCP server: what its work in the stockroom is worth, and how its replies are read."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from environment_fixtures import in_turn, mean_reward, play
from rollout_fixtures import stub, venue_at
from stub_server import StubServer

from environments import Environment, Message, Policy, Task, UnknownEnvironment, load
from environments._mcp_stock import TOOLS, Problem, Stock, next_call
from environments._tool_calls import as_text, tool_calls
from environments.mcp_server import RULES, worth
from steps.agent.play import play as play_recorded

__all__ = ["stub"]

# Solved, completed, failed calls, turns used of those allowed, and the reward by hand:
# solved (1 + 0.1 (1 - turns)) - 0.05 errors, or -1 - 0.05 errors where complete_task was not called.
REWARDS: list[tuple[bool, bool, int, float, float]] = [
    (True, True, 0, 0.2, 1.08),
    (True, True, 0, 1.0, 1.0),
    (True, True, 0, 0.5, 1.05),
    (True, True, 1, 0.3, 1.02),
    (True, True, 8, 1.0, 0.6),
    (False, True, 0, 0.1, 0.0),
    (False, True, 0, 1.0, 0.0),
    (False, True, 3, 0.5, -0.15),
    (False, False, 0, 0.1, -1.0),
    (False, False, 0, 1.0, -1.0),
    (False, False, 10, 1.0, -1.5),
    (False, False, 1, 0.2, -1.05),
]

# The stockroom of seed 149: A: 7 candles, 5 wires; B: 9 saws; C: 8 hinges, 5 lamps, 3 wires.
# A piece costs: candles 8, hinges 3, lamps 8, saws 8, wires 4.
STOCKED = 149
FIND = as_text("find", {"item": "wires"})


def done(answer: Any = "done") -> str:
    return as_text("complete_task", {"answer": answer})


def move(item: str, source: str, target: str, amount: Any) -> str:
    return as_text("move", {"item": item, "source": source, "target": target, "amount": amount})


# Kind of task, what is said, and the reward by hand, of 10 turns; the requests are below.
ATTEMPTS: dict[str, tuple[str, list[str], float]] = {
    "counted": ("count", [FIND, done("8")], 1.08),
    "guessed right": ("count", [done(" 8. ")], 1.09),
    "wrong": ("count", [done("5")], 0.0),
    "right in words": ("count", [done("8 wires")], 0.0),
    "right, but something was moved": ("count", [move("lamps", "C", "A", 1), done("8")], 0.0),
    "said, not called": ("count", ["8"], -1.0),
    "silent": ("count", [""], -1.0),
    "never done": ("count", [FIND] * 10, -1.0),
    "never right": ("count", [as_text("look", {})] * 10, -1.5),
    "many wrong calls in a reply": ("count", [as_text("look", {}) * 500, "no"], -1.5),
    "no JSON, then right": ("count", ["<tool_call>8</tool_call>", done("8")], 1.03),
    "a number for an answer": ("count", [done(8), done("8")], 1.03),
    "two calls in a reply": ("count", [FIND + done("8")], 1.09),
    "nothing after the end": ("count", [done("8") + as_text("look", {})], 1.09),
    "moved": ("move", [move("wires", "A", "B", 3), done()], 1.08),
    "moved in parts": ("move", [move("wires", "A", "B", 2), move("wires", "A", "B", 1), done("Done.")], 1.07),
    "moved too many, and back": ("move", [move("wires", "A", "B", 5), move("wires", "B", "A", 2), done()], 1.07),
    "not moved": ("move", [done()], 0.0),
    "moved too many": ("move", [move("wires", "A", "B", 4), done()], 0.0),
    "moved more than there are": ("move", [move("wires", "A", "B", 6), move("wires", "A", "B", 3), done()], 1.02),
    "moved, and no word": ("move", [move("wires", "A", "B", 3), "well"], -1.0),
    "moved a word for a number": ("move", [move("wires", "A", "B", "three"), done()], -0.05),
    "moved, and said something else": ("move", [move("wires", "A", "B", 3), done("3 wires")], 0.0),
    "cleared": ("clear", [move("candles", "A", "B", 7) + move("wires", "A", "B", 5) + done()], 1.09),
    "half cleared": ("clear", [move("wires", "A", "B", 5), done()], 0.0),
    "valued": ("value", [done("32")], 1.09),
    "valued one": ("value", [as_text("price", {"item": "wires"}), done("4")], 0.0),
}
REQUESTS = {
    "count": "How many wires are there? Answer with the number.",
    "value": "What are all the wires worth together? Answer with the number.",
    "move": "Move 3 wires from shelf A to shelf B. Answer: done",
    "clear": "Move all that lies on shelf A to shelf B. Answer: done",
}


def stockroom(kind: str, **options: Any) -> tuple[Environment, Task]:
    environment = load("mcp_server", kinds=[kind], **options)
    return environment, Task(id="t", seed=STOCKED, data={"task": Problem(STOCKED, (kind,)).text})  # type: ignore[arg-type]


@pytest.mark.parametrize(("solved", "completed", "errors", "turns", "reward"), REWARDS)
def test_an_attempt_is_worth_what_the_formula_says(
    solved: bool, completed: bool, errors: int, turns: float, reward: float
) -> None:
    assert worth(solved, completed, errors, turns) == pytest.approx(reward)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_in_the_stockroom_is_worth(name: str) -> None:
    kind, replies, reward = ATTEMPTS[name]
    environment, task = stockroom(kind)
    assert task.data["task"] == REQUESTS[kind]
    assert play(environment, task, in_turn(replies)).reward == pytest.approx(reward)


def test_the_stockroom_of_a_seed_is_as_the_table_says() -> None:
    stock = Stock.of_seed(STOCKED)
    shelves = {"A": {"candles": 7, "wires": 5}, "B": {"saws": 9}, "C": {"hinges": 8, "lamps": 5, "wires": 3}}
    assert stock.pieces == shelves
    assert stock.prices == {"candles": 8, "hinges": 3, "lamps": 8, "saws": 8, "wires": 4}


def test_each_problem_is_solved_by_the_best_player_and_unsolved_at_first() -> None:
    for seed in range(200):
        problem = Problem(seed)
        stock, messages = Stock.of_seed(seed), [{"role": "user", "content": problem.text}]
        assert problem.answer != "done" or stock.state() != problem.state
        while (call := next_call(messages))[0] != "complete_task":
            messages.append({"role": "tool", "content": stock.call(*call)})
        assert (call[1]["answer"], stock.state()) == (problem.answer, problem.state)


def test_kinds_of_task_can_be_chosen() -> None:
    tasks = load("mcp_server", kinds=["value"]).tasks("train")[:20]
    assert all(task.data["task"].startswith("What are all the") for task in tasks)


def test_answers_and_errors_come_back_as_tool_messages() -> None:
    environment, task = stockroom("count")
    seen: list[Sequence[Message]] = []
    replies = in_turn([FIND, as_text("find", {"item": "gold"}), as_text("find", {}), as_text("fnid", {}), done("6")])

    def answer(messages: Sequence[Message]) -> str | None:
        seen.append([dict(message) for message in messages])
        return replies(messages)

    result = play(environment, task, answer)
    told = [message["content"] for message in seen[-1] if message["role"] == "tool"]
    assert told[0] == "A: 5, C: 3"
    assert told[1] == "error: no item 'gold'; there are candles, hinges, lamps, saws, wires"
    assert told[2] == "error: item: Field required"
    assert told[3] == "error: no tool 'fnid'; there are find, list_shelf, price, move"
    assert result.metrics == {"turns": 5, "tool_errors": 3, "completed": 1, "solved": 0}
    assert result.metadata == {"kind": "count"}


async def test_calls_that_the_server_parsed_are_recorded_and_answered(stub: StubServer) -> None:
    environment, task = stockroom("count")
    calls = iter([FIND, done("8")])
    stub.reply = lambda request, choice: _quoted(next(calls))
    async with venue_at(stub, environment) as venue:
        trajectory = await play_recorded(venue, task, attempt=0)
    assert trajectory.failure is None and trajectory.reward == pytest.approx(1.08)
    names = [tool["function"]["name"] for tool in stub.requests[0]["tools"]]
    assert names == ["find", "list_shelf", "price", "move", "complete_task"]
    assert stub.requests[1]["messages"][-2]["tool_calls"][0]["function"]["name"] == "find"
    assert stub.requests[1]["messages"][-1]["content"] == "A: 5, C: 3"
    assert len(trajectory.sequences) == 1, "each prompt extends what came before"


def _quoted(call: str) -> str:
    """The call as the stub takes it: arguments as a string of JSON, as the API has them."""
    [made] = tool_calls({"content": call})
    return f"<tool_call>{json.dumps({'name': made.name, 'arguments': json.dumps(made.arguments)})}</tool_call>"


def test_a_model_without_a_template_for_tools_reads_of_them_in_the_text() -> None:
    environment, task = stockroom("count", tool_calls="text")
    seen: list[Sequence[Message]] = []

    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        assert "tools" not in request
        seen.append(request["messages"])
        return {"choices": [{"message": {"role": "assistant", "content": done("6")}}]}

    asyncio.run(environment.rollout(task, Policy(complete, base_url="", api_key="", model="m")))
    rules = seen[0][0]["content"]
    assert rules.startswith(RULES)
    tools = [json.loads(line) for line in rules.split("\n") if line.startswith("{")]
    assert [tool["name"] for tool in tools] == ["find", "list_shelf", "price", "move", "complete_task"]
    assert tools[0]["parameters"] == TOOLS[0]["input_schema"]


@pytest.mark.parametrize("how", ["native", "text"])
def test_demonstrations_are_read_back_as_the_calls_they_show(how: str) -> None:
    demonstrations = iter(load("mcp_server", tool_calls=how).demonstrations(Random(5)))
    for _ in range(20):
        messages = next(demonstrations)
        made = [call for message in messages if message["role"] == "assistant" for call in tool_calls(message)]
        assert made and made[-1].name == "complete_task" and not any(call.problem for call in made)
        answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert answered == [f"call-{i}" for i in range(len(made) - 1)]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "<tool_call>{</tool_call>"}, "must be JSON"),
        ({"content": "<tool_call>[]</tool_call>"}, "must be like"),
        ({"content": '<tool_call>{"name": 3}</tool_call>'}, "must be like"),
        ({"content": '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'}, "must be an object"),
        ({"content": '<tool_call>{"name": "a", "arguments": "{"}</tool_call>'}, "arguments must be JSON"),
        ({"content": '<tool_call>{"name": "a"}'}, None),
        ({"content": f"<tool_call>{'[' * 100_000}</tool_call>"}, "must be JSON"),
        ({"tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "nonsense"}}]}, "arguments must be JSON"),
        ({"tool_calls": [{"id": "1", "function": {"name": "a", "arguments": ""}}]}, None),
    ],
)
def test_a_call_that_makes_no_sense_says_why(message: Message, problem: str | None) -> None:
    [call] = tool_calls(message)
    assert problem in call.problem if problem and call.problem else call.problem is problem


def test_players_are_worth_what_they_say_of_each_kind() -> None:
    for kind in REQUESTS:
        environment = load("mcp_server", kinds=[kind])
        assert 1.0 <= mean_reward(environment, "best", environment.tasks("test")[:8]) <= 1.1


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tasks, and a module that rewards them."""
    rows = [{"id": "a", "task": "How many lamps?", "seed": 149}, {"id": "b", "split": "test", "task": "And nails?"}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own_grades.py").write_text(
        "async def grade(task, attempt):\n"
        "    lamps = await attempt.session.call('find', {'item': 'lamps'})\n"
        "    return float(attempt.answer == '5' and lamps.text == 'C: 5')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "tasks.jsonl"


def test_tasks_of_a_file_are_rewarded_for_completing_or_by_a_function(tasks: Path) -> None:
    completed, graded = (
        load("mcp_server", scenarios=tasks),
        load("mcp_server", scenarios=tasks, reward="own_grades:grade"),
    )
    [task] = completed.tasks("train")
    assert [play(completed, task, in_turn([reply])).reward for reply in (done("5"), done(), "5")] == [1, 1, 0]
    assert [play(graded, task, in_turn([reply])).reward for reply in (done("5"), done(), "5")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["a"], "url": "http://a"}, "a command or a url, not both"),
        ({"command": ["a"]}, "needs `scenarios`"),
        ({"url": "http://a"}, "needs `scenarios`"),
        ({"reward": "grade"}, r"option 'reward': .*package.module:function"),
        ({"reward": "json:grade"}, r"option 'reward': .*package.module:function"),
        ({"reward": "no_such_module:grade"}, "can't be imported: No module named 'no_such_module'"),
        ({"kinds": ["steal"]}, "option 'kinds.0'"),
        ({"kinds": []}, "option 'kinds'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownEnvironment, match=message) as error:
        load("mcp_server", **options)
    assert "\n" not in str(error.value)


def test_a_task_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "?"}')
    with pytest.raises(UnknownEnvironment, match="task 'a' has no text in the field `task`"):
        load("mcp_server", scenarios=tmp_path / "tasks.jsonl").tasks("train")
