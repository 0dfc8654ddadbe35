"""reasoning-gym's datasets as tasks: what an answer is worth, and that no question is in both splits."""

from itertools import islice
from random import Random
from typing import Any

import pytest
from environment_fixtures import in_turn, mean_reward, play

from environments import Environment, Task, UnknownEnvironment, load
from environments.reasoning_gym_tasks import ReasoningGymTasks, given, scored, total

pytest.importorskip("reasoning_gym", reason="install nightschool[reasoning], which needs a C compiler")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Less than 200 questions: 1 + 1 to 9 - 9."""

# Replies with their worth by hand: 1 for the number alone, else 2 / (the answer's length) where "-4" is contained.
QUESTION = "State the final answer to the following arithmetic problem: 4 - 1 - 7 ="
REWARDS: list[tuple[str, float]] = [
    ("-4", 1.0),
    (" -4\n", 1.0),
    ("<answer>-4</answer>", 1.0),
    ("4 - 1 is 3, so <answer> -4 </answer>.", 1.0),
    ("<answer>3</answer> no: <answer>-4</answer>", 1.0),
    ("<answer>-4</answer> no: <answer>3</answer>", 0.0),
    ("It is -4", 2 / 8),
    ("<answer>it is -4</answer>", 2 / 8),
    ("-4.0", 1.0),
    ("-04", 1.0),
    ("-4.5", 2 / 4),
    ("-40", 2 / 3),
    ("4", 0.0),
    ("- 4", 0.0),
    ("", 0.0),
    ("<answer></answer>", 0.0),
    ("<answer>-4", 2 / 10),
]


def reasoning_gym(**options: Any) -> ReasoningGymTasks:
    environment: Environment = load("reasoning_gym_tasks", **options)
    assert isinstance(environment, ReasoningGymTasks)
    return environment


@pytest.mark.parametrize(("reply", "reward"), REWARDS)
def test_an_answer_is_worth_its_share_of_the_reply(reply: str, reward: float) -> None:
    environment = reasoning_gym()
    assert environment.question(1)[1]["question"] == QUESTION
    result = play(environment, Task(id="t", seed=1), in_turn([reply]))
    assert result.reward == pytest.approx(reward)
    assert result.metrics == {"solved": float(reward == 1), "unreadable": 0}


@pytest.mark.parametrize(
    ("dataset", "reply", "score", "unreadable"),
    [
        ("prime_factorization", "zzz", 0.0, True),
        ("boxnet", "[1, 2]", 0.0, True),
        ("letter_counting", "zzz", 0.0, False),
        ("game_of_life", "{}", 0.0, True),
    ],
)
def test_an_answer_that_a_scorer_trips_over_is_wrong(dataset: str, reply: str, score: float, unreadable: bool) -> None:
    made, entry = reasoning_gym(dataset=dataset).question(5)
    assert scored(made, reply, entry) == (score, unreadable)


@pytest.mark.parametrize(
    "dataset", ["caesar_cipher", "family_relationships", "knights_knaves", "mini_sudoku", "zebra_puzzles"]
)
def test_a_dataset_of_every_sort_takes_its_own_answer(dataset: str) -> None:
    environment = reasoning_gym(dataset=dataset)
    for task in [*environment.tasks("train")[:3], *environment.tasks("test")[:3]]:
        made, entry = environment.question(task.seed)
        assert play(environment, task, in_turn([f"<answer>{entry['answer']}</answer>"])).reward == 1
        assert scored(made, given("no idea"), entry)[0] < 0.5


def test_no_question_is_in_both_splits_of_a_small_dataset() -> None:
    environment = reasoning_gym(parameters=SMALL)
    train, test = (
        {environment.question(task.seed)[1]["question"] for task in environment.tasks(split)[:400]}
        for split in ("train", "test")
    )
    shown = {messages[1]["content"] for messages in islice(environment.demonstrations(Random(1)), 400)}
    assert len(train) > 100 and len(test) > 20 and not test & (train | shown)


def test_a_dataset_of_one_question_can_not_be_split() -> None:
    environment = reasoning_gym(dataset="count_bits", parameters={"min_n": 5, "max_n": 5})
    with pytest.raises(UnknownEnvironment, match="count_bits with these parameters has too few questions to hold some"):
        [environment.tasks(split) for split in ("train", "test")]


def test_equal_seeds_ask_equal_questions() -> None:
    environment = reasoning_gym(dataset="word_sorting")
    first, again, other = (environment.question(seed)[1]["question"] for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chainsum"}, r"no dataset 'chainsum'; there are chain_sum"),
        ({"dataset": "?"}, r"no dataset '\?'; there are ab, acre, .*zebra_puzzles"),
        ({"parameters": {"terms": 2}}, "chain_sum does not take these parameters: .*'terms'"),
        ({"parameters": {"min_terms": 0}}, "chain_sum does not take these parameters: min_terms must be positive"),
        ({"parameters": {"size": 2}}, "chain_sum does not take these parameters: .*'size'"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownEnvironment, match=message) as error:
        reasoning_gym(**options).tasks("train")
    assert "\n" not in str(error.value)


def test_a_dataset_without_answers_shows_none() -> None:
    with pytest.raises(UnknownEnvironment, match="graph_color scores answers, but gives none to show"):
        next(iter(reasoning_gym(dataset="graph_color").demonstrations(Random(0))))


def test_players_are_worth_what_they_say_of_small_sums() -> None:
    environment = reasoning_gym(parameters=SMALL)
    assert mean_reward(environment, "best", environment.tasks("test")[:50]) == 1
    assert not reasoning_gym(dataset="gcd").players()


def test_a_chain_of_sums_is_read_from_its_question() -> None:
    assert total(QUESTION) == -4
