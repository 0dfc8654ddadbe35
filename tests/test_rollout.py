"""The rollout and evaluate steps: whatever an agent or the server does, it is counted, bounded and said."""

from pathlib import Path
from typing import Any

import agents
import pytest
from agents import Talk
from rollout_fixtures import QUICK, coroutine_environment, evaluate_inputs, rollout_inputs, stub, venue_at
from stub_server import StubServer

from environments import Environment, Task, Trajectory, load
from steps.agent.play import play
from steps.agent.sampling import Notices
from steps.agent.shard import SUFFIX, sweep_groups
from steps.common import layout, tables
from steps.common.artifacts import read_manifest, verify
from steps.common.errors import InvalidInputs, ServerFault, TooManyFailures
from steps.common.settings import EnvironmentSettings
from steps.evaluate import EVALUATE
from steps.rollout import ROLLOUT

__all__ = ["stub"]
PATH = layout.rollouts(3, 1)
TALK = EnvironmentSettings(name="agents:Talk")
TASK = Task(id="task-0")


@pytest.fixture
def served(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> StubServer:
    for name, value in stub.environment.items():
        monkeypatch.setenv(name, value)
    return stub


def agent(folder: Path, name: str) -> Environment:
    settings = coroutine_environment(folder, name)
    return load(settings.name, **settings.options)


def trajectories_in(root: Path, path: str) -> list[Trajectory]:
    frame = tables.read([root / path / tables.TRAJECTORIES], tables.TRAJECTORY_COLUMNS)
    return [t for group in tables.groups_of_frame(frame) for t in group.trajectories]


def test_a_shard_is_played_and_published(served: StubServer, tmp_path: Path) -> None:
    rollouts = ROLLOUT.run(rollout_inputs(TALK), tmp_path, PATH)
    trajectories = trajectories_in(tmp_path, PATH)
    assert (rollouts.groups, rollouts.trajectories, rollouts.failed) == (4, 8, 0)
    assert [(t.task_id, t.attempt) for t in trajectories] == [(f"train-{i}", j) for i in range(4) for j in range(2)]
    assert rollouts.mean_reward == pytest.approx(sum(t.reward or 0 for t in trajectories) / 8)
    assert rollouts.completion_tokens == sum(sum(s.mask) for t in trajectories for s in t.sequences)
    assert all(t.turns == 3 and len(t.messages) == 6 and len(t.sequences) == 1 for t in trajectories)
    manifest = verify(tmp_path / PATH)
    assert manifest.measured["requests"] == len(served.requests) == 24
    assert list(tmp_path.rglob(f".*{SUFFIX}")) == []


def test_the_same_inputs_sample_the_same(served: StubServer, tmp_path: Path) -> None:
    def tokens(root: str, **changes: Any) -> list[list[int]]:
        ROLLOUT.run(rollout_inputs(TALK, **changes), tmp_path / root, PATH)
        return [s.token_ids for t in trajectories_in(tmp_path / root, PATH) for s in t.sequences]

    first = tokens("first")
    assert tokens("second") == first
    assert tokens("other seed", seed=8) != first
    assert tokens("other iteration", iteration=4) != first
    assert len({tuple(ids) for ids in first}) == len(first), "attempts at one task must differ"


def test_evaluation_averages_held_out_tasks(served: StubServer, tmp_path: Path) -> None:
    settings = EnvironmentSettings(name="agents:Talk", options={"count": 9})
    evaluation = EVALUATE.run(evaluate_inputs(settings), tmp_path, "evaluations/0003")
    rewards = [t.reward or 0.0 for t in trajectories_in(tmp_path, "evaluations/0003")]
    mean = sum(rewards) / 9
    assert evaluation.reward == pytest.approx(mean)
    assert evaluation.stderr == pytest.approx((sum((r - mean) ** 2 for r in rewards) / 8 / 9) ** 0.5)
    assert (evaluation.iteration, evaluation.tasks, evaluation.failed) == (3, 9, 0)
    assert evaluation.metrics == {"turns": 3.0}
    again = EVALUATE.run(evaluate_inputs(settings), tmp_path / "again", "evaluations/0004")
    assert again.reward == evaluation.reward


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "LookupError", "no such shelf\nin here"),
        ("hangs", "RolloutTimeout", "no result after 0.3 s"),
        ("returns_nothing", "TypeError", "agents:returns_nothing returned None; it must return a number, or a Result"),
        ("returns_text", "TypeError", "returned 'a good one'"),
        ("returns_nan", "BadReward", "the reward is nan"),
        ("returns_infinity", "BadReward", "the reward is inf"),
        ("measures_nan", "BadMetric", "the metric 'speed' is nan"),
        ("exits", "SystemExit", "0"),
        ("cancels_itself", "CancelledError", "cancelled itself"),
    ],
)
async def test_a_misbehaving_agent_is_a_failed_trajectory(
    stub: StubServer, tmp_path: Path, name: str, kind: str, message: str
) -> None:
    limits = QUICK.model_copy(update={"rollout_timeout": 0.3})
    async with venue_at(stub, agent(tmp_path, name), limits) as venue:
        trajectory = await play(venue, TASK, attempt=1)
    assert trajectory.failure
    assert trajectory.failure.type == kind
    assert message in trajectory.failure.message
    assert (trajectory.reward, trajectory.attempt) == (None, 1)
    if name == "raises":
        assert "tests/agents.py" in trajectory.failure.traceback
        assert trajectory.turns == 1
        assert trajectory.sequences
        seeds = [request["seed"] for request in stub.requests]
        assert len(seeds) == len(set(seeds)) == 2, "tried again, sampled anew"


async def test_a_rollout_without_a_result_is_a_failure(stub: StubServer) -> None:
    async with venue_at(stub, agents.NotOne()) as venue:
        trajectory = await play(venue, TASK, attempt=0)
    assert trajectory.failure
    assert trajectory.failure.message == "the rollout returned NoneType, not a Result"


async def test_a_reward_that_was_posted_counts_where_none_is_returned(stub: StubServer, tmp_path: Path) -> None:
    async with venue_at(stub, agent(tmp_path, "has_its_reward_posted")) as venue:
        assert (await play(venue, TASK, attempt=0)).reward == 2


def test_an_agent_that_will_not_stop_is_left_behind(
    served: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"rollout_timeout": 0.1, "teardown_timeout": 0.1, "agent_retries": 0}
    inputs = rollout_inputs(coroutine_environment(tmp_path, "will_not_stop"), limits=limits, max_failed_fraction=1)
    assert ROLLOUT.run(inputs, tmp_path, PATH).failures == {"RolloutTimeout": 8}
    assert "an agent had not stopped 0.1 s after it was cancelled" in capsys.readouterr().err


async def test_what_an_agent_asks_after_its_reward_is_refused(stub: StubServer, tmp_path: Path) -> None:
    async with venue_at(stub, agent(tmp_path, "talks_to_itself")) as venue:
        trajectory = await play(venue, TASK, attempt=0)
        [task] = agents.running
        with pytest.raises(Exception, match="over"):
            await task
    assert trajectory.reward == 1
    assert 0 < trajectory.turns <= len(stub.requests) <= trajectory.turns + 1


async def test_a_failure_is_forgotten_when_the_next_try_succeeds(stub: StubServer, tmp_path: Path) -> None:
    agents.tries.clear()
    async with venue_at(stub, agent(tmp_path, "fails_once")) as venue:
        trajectory = await play(venue, TASK, attempt=0)
    assert (trajectory.failure, trajectory.reward, trajectory.turns) == (None, 1.0, 1)
    assert len(stub.requests) == 2


async def test_inexact_tokens_fail_the_rollout_whatever_the_agent_says(stub: StubServer, tmp_path: Path) -> None:
    stub.spoil = lambda response: response.update(prompt_token_ids=None)
    async with venue_at(stub, agent(tmp_path, "swallows_everything")) as venue:
        trajectory = await play(venue, TASK, attempt=0)
    assert trajectory.failure
    assert trajectory.failure.type == "InexactTokens"


async def test_a_server_fault_is_no_fault_of_the_agent(stub: StubServer, tmp_path: Path) -> None:
    stub.fault = lambda number: 500 if number < 3 else None  # Two requests of the first try, one of the second.
    async with venue_at(stub, agent(tmp_path, "swallows_everything")) as venue:
        trajectory = await play(venue, TASK, attempt=0)
        assert trajectory.failure is None
        assert len(stub.requests) == 4
        stub.fault = lambda number: 500
        with pytest.raises(ServerFault, match="HTTP 500: stub says 500"):
            await play(venue, TASK, attempt=0)
    assert len(stub.requests) == 4 + 2 * 2


async def test_a_rollout_that_the_server_holds_up_is_a_server_fault(stub: StubServer) -> None:
    limits = QUICK.model_copy(
        update={"rollout_timeout": 0.5, "request_timeout": 0.2, "request_retries": 9, "server_retries": 0}
    )
    stub.delay = 5
    async with venue_at(stub, Talk(), limits) as venue:
        with pytest.raises(ServerFault, match="has not answered"):
            await play(venue, TASK, attempt=0)


def test_too_many_failures_stop_the_shard(served: StubServer, tmp_path: Path) -> None:
    limits = QUICK.model_copy(update={"concurrency": 2})
    inputs = rollout_inputs(coroutine_environment(tmp_path, "raises"), limits=limits)
    served.delay = 0.2
    with pytest.raises(TooManyFailures) as error:
        ROLLOUT.run(inputs, tmp_path, PATH)
    message = str(error.value)
    assert "\n" not in message
    assert "of 8 rollouts failed, 0.8 may; most often" in message
    assert "LookupError: no such shelf in here; all of them" in message
    assert len(served.requests) <= 6, "it stops as soon as it is certain"
    assert not (tmp_path / PATH).exists()
    [file] = (tmp_path / "logs/failed").iterdir()
    assert str(file) in message
    rows = tables.read([file], tables.TRAJECTORY_COLUMNS)
    assert "agents.py" in rows["failure_traceback"][0]


def test_failures_within_the_allowance_are_data(served: StubServer, tmp_path: Path) -> None:
    inputs = rollout_inputs(coroutine_environment(tmp_path, "raises"), max_failed_fraction=1)
    rollouts = ROLLOUT.run(inputs, tmp_path, PATH)
    assert (rollouts.failed, rollouts.failures, rollouts.mean_reward) == (8, {"LookupError": 8}, None)
    with pytest.raises(TooManyFailures, match="0 tasks have a reward"):
        settings = coroutine_environment(tmp_path, "raises").options["file"]
        Path(settings).write_text('{"id": "a", "split": "test"}\n{"id": "b", "split": "test"}\n')
        environment = EnvironmentSettings(name="agents:raises", options={"file": settings})
        EVALUATE.run(evaluate_inputs(environment, max_failed_fraction=1), tmp_path, "evaluations/0003")


def test_after_too_many_failures_only_the_failed_groups_are_played_again(served: StubServer, tmp_path: Path) -> None:
    environment = coroutine_environment(tmp_path, "fails_once", tasks=3)
    limits = QUICK.model_copy(update={"agent_retries": 0, "concurrency": 1})
    inputs = rollout_inputs(environment, limits=limits, max_failed_fraction=0.1)
    agents.tries.clear()
    agents.tries["task-0"] = agents.tries["task-2"] = 1
    served.delay = 0.2
    with pytest.raises(TooManyFailures, match="1 of 6 rollouts failed"):
        ROLLOUT.run(inputs, tmp_path, PATH)
    before = len(served.requests)
    assert before < 6
    agents.tries["task-1"] = 1  # It was counted in a process that is gone.
    assert ROLLOUT.run(inputs, tmp_path, PATH).failed == 0
    assert len(served.requests) - before == 4, "all but the first group"


def test_a_server_that_is_gone_keeps_what_is_finished(
    served: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = QUICK.model_copy(update={"request_retries": 0, "server_retries": 0, "concurrency": 2})
    inputs = rollout_inputs(TALK, limits=limits)
    served.fault = lambda number: 0 if number >= 7 else None
    with pytest.raises(ServerFault) as error:
        ROLLOUT.run(inputs, tmp_path, PATH)
    assert error.value.exit_status not in (0, 202)
    [folder] = tmp_path.rglob(f".*{SUFFIX}")
    assert [file.name for file in folder.iterdir()] == ["0000.parquet"]
    served.fault = lambda number: None
    before = len(served.requests)
    assert ROLLOUT.run(inputs, tmp_path, PATH).trajectories == 8
    assert "1 of 4 groups are finished already" in capsys.readouterr().out
    assert len(served.requests) - before == 3 * 2 * 3
    assert not folder.exists()


def test_a_damaged_group_is_played_again(
    served: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = rollout_inputs(TALK)
    folder = tmp_path / f"iterations/0003/rollouts/.001.{inputs.fingerprint()[:12]}{SUFFIX}"
    folder.mkdir(parents=True)
    (folder / "0002.parquet").write_bytes(b"half")
    assert ROLLOUT.run(inputs, tmp_path, PATH).groups == 4
    assert "a finished group is damaged and will be played again" in capsys.readouterr().out


def test_group_folders_of_finished_shards_are_swept(served: StubServer, tmp_path: Path) -> None:
    ROLLOUT.run(rollout_inputs(TALK), tmp_path, PATH)
    done = tmp_path / f"iterations/0003/rollouts/.001.aaaaaaaaaaaa{SUFFIX}"
    unfinished = tmp_path / f"iterations/0003/rollouts/.002.aaaaaaaaaaaa{SUFFIX}"
    for folder in (done, unfinished):
        folder.mkdir()
    assert sweep_groups(tmp_path) == [done]
    assert not done.exists() and unfinished.exists()
    done.mkdir()
    ROLLOUT.run(rollout_inputs(TALK), tmp_path, PATH)
    assert not done.exists(), "the step itself cleans up when it finds its artifact"


def test_limits_are_no_part_of_the_result(served: StubServer, tmp_path: Path) -> None:
    ROLLOUT.run(rollout_inputs(TALK), tmp_path, PATH)
    ROLLOUT.run(rollout_inputs(TALK, limits=QUICK.model_copy(update={"concurrency": 1})), tmp_path, PATH)
    with pytest.raises(InvalidInputs, match="seed: 7 then, 8 now"):
        ROLLOUT.run(rollout_inputs(TALK, seed=8), tmp_path, PATH)


def test_warnings_are_counted_in_the_manifest(served: StubServer, tmp_path: Path) -> None:
    ROLLOUT.run(rollout_inputs(EnvironmentSettings(name="agents:Bends")), tmp_path, PATH)
    manifest = read_manifest(tmp_path / PATH)
    assert manifest and manifest.measured["warned_top_p"] == 8


@pytest.mark.parametrize("name", ["agents:nobody", "no_such_environment", "no_such_package:Agent"])
def test_an_unknown_environment_is_wrong_input(served: StubServer, tmp_path: Path, name: str) -> None:
    inputs = rollout_inputs(TALK).model_copy(update={"environment": EnvironmentSettings(name=name)})
    with pytest.raises(InvalidInputs, match=name.split(":")[-1] if ":" not in name else name.split(":")[0]):
        ROLLOUT.run(inputs, tmp_path, PATH)


def test_a_missing_address_is_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY", "MODEL"):
        monkeypatch.delenv(f"NIGHTSCHOOL_POLICY_{name}", raising=False)
    with pytest.raises(InvalidInputs, match=r"NIGHTSCHOOL_POLICY_URL, .* not set"):
        ROLLOUT.run(rollout_inputs(TALK), tmp_path, PATH)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_notices_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices()
    for _ in range(3):
        notices.warn("a", "careful")
    assert capsys.readouterr().err == "warning: careful (shown once)\n"
    assert notices.counts["a"] == 3
