"""E-mail search: rewards by hand, when an answer is right, and the judge."""

import asyncio
import json
from collections.abc import Callable
from datetime import date
from typing import Any

import openai
import pytest
from environment_fixtures import in_turn, play, played_by
from judge_fixtures import KEY_VARIABLE, JudgeServer, fault, judge
from mail_fixtures import REWARDS, said, task_of

from environments import Result, load
from environments._mail_attempt import Question, openai_tools, same
from environments._mail_judge import JudgeFailed
from environments._mail_store import Mail, MailStore
from environments._tool_calls import as_text, listed

__all__ = ["judge"]


@pytest.mark.parametrize("case", REWARDS)
def test_an_attempt_is_worth_what_the_formula_says(case: str) -> None:
    kind, replies, reward = REWARDS[case]
    environment = load("email_search")
    task, question = task_of(environment, kind)
    left = replies(question)
    result = play(environment, task, lambda messages: left.pop(0))
    assert result.reward == pytest.approx(reward, abs=1e-9)
    assert not left, "it went on to the end"


def test_calls_written_as_text_are_worth_the_same() -> None:
    environment = load("email_search", tool_calls="text")
    seen: list[Any] = []
    for kind, replies, reward in REWARDS.values():
        task, question = task_of(environment, kind)
        replied = in_turn(replies(question))

        def answer(messages: Any, replied: Callable[[Any], str | None] = replied) -> str | None:
            seen.append(messages[0]["content"])
            return replied(messages)

        assert play(environment, task, answer).reward == pytest.approx(reward, abs=1e-9)
    assert "search_inbox" in seen[0]


def test_of_several_calls_in_a_turn_the_first_is_made() -> None:
    environment = load("email_search")
    task, question = task_of(environment, "plain")
    asked: list[Any] = []

    def twice(messages: Any) -> str:
        asked.append(list(messages))
        search = as_text("search_inbox", {"keywords": question.searches[0].split()})
        return search + said("yes") if len(asked) == 1 else said(question.answer, *question.message_ids)

    assert play(environment, task, twice).reward == pytest.approx(1.48)
    assert [m["role"] for m in asked[1]] == ["system", "user", "assistant", "tool", "tool"]
    assert question.message_ids[0] in asked[1][3]["content"]
    assert "not done" in asked[1][4]["content"]


def test_what_happened_is_measured() -> None:
    environment = load("email_search", max_turns=4)
    task, question = task_of(environment, "plain")
    result = play(environment, task, in_turn(REWARDS["right after a look"][1](question)))
    assert result.reward == pytest.approx(1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 4))
    assert result.metadata == {"ending": "answered", "answer": question.answer}
    expected = {"turns": 3, "correct": 1, "named": 1, "found_sources": 1, "read_sources": 1, "invalid_reads": 0}
    assert result.metrics | expected == result.metrics


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Elm 4", "elm 4.", True),
        ("$48,500", "48500", True),
        ("The Elm 4", " elm\n4", True),
        ("14:30", "14.30", False),
        ("2026-03-01", "2026 03 01", False),
        ("555-0123", "555-0124", False),
        ("Elm 4", "room Elm 4", False),
        ("12", "1,2", False),
        ("I don't know", "I don\u2019t know!", True),
    ],
)
def test_answers_are_compared_word_for_word(one: str, other: str, equal: bool) -> None:
    assert same(one, other) == same(other, one) == equal


def test_no_inbox_is_in_both_splits() -> None:
    environment = load("email_search")
    train, test = ({task.data["inbox_address"] for task in environment.tasks(split)} for split in ("train", "test"))
    assert not train & test
    assert (len(train) > 30, len(test) > 10, len(environment.tasks("test"))) == (True, True, 128)


def test_rollouts_that_run_together_do_not_mix() -> None:
    environment = load("email_search")
    [best, *_] = environment.players()

    async def attempt(index: int) -> Result:
        task = environment.tasks("train")[index]
        with played_by(lambda messages: best.act(messages, None)) as policy:  # type: ignore[arg-type]
            return await environment.rollout(task, policy)

    async def together() -> list[Result]:
        return await asyncio.gather(*(attempt(index) for index in range(40)))

    assert asyncio.run(together()) == [asyncio.run(attempt(index)) for index in range(40)]


def judged(judge: JudgeServer, answer: str, **options: Any) -> Result:
    """An answer in its first turn, with its source."""
    settings = {"model": "judge", "base_url": judge.url, "key_variable": KEY_VARIABLE, "retries": 1, **options}
    environment = load("email_search", judge=settings)
    task, question = task_of(environment, "plain")
    return play(environment, task, in_turn([said(answer or question.answer, *question.message_ids)]))


def test_a_judge_is_asked_where_words_differ(judge: JudgeServer) -> None:
    judge.reply = lambda request, number: "True."
    assert judged(judge, "It is what we said.").reward == pytest.approx(1.49)
    [request] = judge.requests
    question = task_of(load("email_search"), "plain")[1]
    assert f"Question: {question.question}\nRight answer: {question.answer}\n" in request["messages"][1]["content"]
    judge.reply = lambda request, number: "false"
    assert judged(judge, "It is not.").reward == pytest.approx(-0.8)
    assert judged(judge, "I don't know").reward == pytest.approx(0.1)
    assert judged(judge, "").reward == pytest.approx(1.49)
    assert len(judge.requests) == 2, "what matches word for word, and no answer, ask nobody"


def test_a_judge_that_mumbles_is_asked_again(judge: JudgeServer) -> None:
    judge.reply = lambda request, number: "true" if number == 2 else "Well, it depends."
    assert judged(judge, "yes").reward == pytest.approx(1.49)
    assert len(judge.requests) == 3
    judge.reply = lambda request, number: "Well, it depends."
    with pytest.raises(JudgeFailed, match=r"asked 3 times for true or false, and said 'Well, it depends\.'"):
        judged(judge, "yes")
    assert len(judge.requests) == 6


def test_a_judge_that_fails_makes_no_answer_wrong(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    judge.reply = lambda request, number: fault(429, "slowly", **{"retry-after-ms": "1"}) if number == 0 else "true"
    assert judged(judge, "yes").reward == pytest.approx(1.49)
    judge.reply = lambda request, number: fault(500, "broken", **{"retry-after-ms": "1"})
    with pytest.raises(openai.InternalServerError, match="broken"):
        judged(judge, "yes")
    assert len(judge.requests) == 2 + 2
    judge.delay = 0.15
    with pytest.raises(openai.APITimeoutError):
        judged(judge, "yes", timeout=0.05, retries=0)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(JudgeFailed, match=f"{KEY_VARIABLE}, the judge's key_variable, is not set"):
        judged(judge, "yes")


def test_a_long_mail_is_cut_and_says_so() -> None:
    store = MailStore.in_memory([Mail("1", "2025-01-01T09:00", "a@x", (), "Long", "word " * 2000)])
    environment = load("email_search")
    attempt = environment.attempt(environment.tasks("train")[0])  # type: ignore[attr-defined]
    attempt.store, attempt.question = store, Question(question="?", inbox_address="a@x", query_date=date(2025, 1, 1))
    read = json.loads(attempt.call("read_email", {"message_id": "1"}))
    assert read["body"].endswith("(5000 characters more)")
    assert len(read["body"]) < 5050


def test_the_tools_are_described_in_few_words() -> None:
    assert len(listed(openai_tools())) < 1500
