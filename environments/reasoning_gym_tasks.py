"""The questions of reasoning-gym: any of its datasets by name, scored by the dataset itself.

Asked: the question that the dataset makes of the task's seed. The answer is the reply, or what stands between the last
`<answer>` and `</answer>` in it. Turns: 1.

Rewarded: what the dataset's `score_answer` gives, mostly from 0 to 1; 0 where it can't make sense of the answer. Unless
a dataset has its own rule, that is 1 for the right answer, (its length) / (the answer's length) for one that contains
it, else 0.

No question is in both splits, however small the dataset: a question's hash says whether it is held out, and a task
whose question is of the other split takes that of its next seed.

It needs the package `reasoning-gym` wherever questions are made: for the flow, the rollouts and `model.pretrain`. It is
the extra `reasoning`, a part of which is compiled: `tools/setup reasoning`, where there is a C compiler.
"""

import json
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from environments.base import Environment, Message, Player, Policy, Result, Split, Task, UnknownEnvironment

TEST_SEEDS = 1_000_000_000
NEXT_SEED = 10_000_000
"""Added to a seed whose question is of the other split."""
TRIES = 100
EVERY_FIFTH = 5
"""Of the questions is held out."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
RULES = "Answer the question. Reply with the answer alone, or think first and end with <answer>the answer</answer>."

Dataset = Any
"""reasoning-gym's, which has no types."""
Entry = dict[str, Any]
"""What a dataset knows of a question: `question`, `answer`, `metadata`."""


class ReasoningGymTasks(Environment):
    """Questions of one dataset."""

    dataset: str = "chain_sum"
    """reasoning-gym's name of it."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Of the dataset's configuration, but for its seed and size: they say how hard the questions are."""
    train_tasks: Annotated[int, Field(ge=1, le=NEXT_SEED)] = 8192
    """Tasks to train on."""
    test_tasks: PositiveInt = 256
    """Held-out tasks."""

    def tasks(self, split: Split) -> Sequence[Task]:
        first, count = (0, self.train_tasks) if split == "train" else (TEST_SEEDS, self.test_tasks)
        self.question(first)  # An unknown dataset, or one without enough questions, is said now.
        return [Task(id=f"{split}-{i}", seed=first + i) for i in range(count)]

    def question(self, seed: int) -> tuple[Dataset, Entry]:
        """The question of a task, with the dataset that scores answers to it. Raises `UnknownEnvironment`."""
        held_out = seed >= TEST_SEEDS
        for i in range(TRIES):
            made = _make(self.dataset, json.dumps(self.parameters, sort_keys=True), seed + i * NEXT_SEED)
            if _is_held_out(made[1]["question"]) == held_out:
                return made
        raise UnknownEnvironment(
            f"reasoning_gym_tasks: {self.dataset} with these parameters has too few questions to hold some out"
        )

    async def rollout(self, task: Task, policy: Policy) -> Result:
        dataset, entry = self.question(task.seed)
        reply = await policy.chat(_asked(entry))
        score, unreadable = scored(dataset, given(reply["content"] or ""), entry)
        return Result(reward=score, metrics={"solved": float(score >= 1), "unreadable": float(unreadable)})

    def demonstrations(self, random: Random) -> Iterable[list[Message]]:
        """Questions with their answers, without the thinking between. Raises `UnknownEnvironment` if there are none."""
        while True:
            _, entry = self.question(random.randrange(NEXT_SEED))
            if not isinstance(entry["answer"], str):
                raise UnknownEnvironment(f"reasoning_gym_tasks: {self.dataset} scores answers, but gives none to show")
            yield [*_asked(entry), {"role": "assistant", "content": entry["answer"]}]

    def players(self) -> Sequence[Player]:
        if self.dataset != "chain_sum":
            return ()
        return (
            Player("best", lambda messages, random: str(total(str(messages[-1]["content"]))), (1.0, 1.0)),
            Player("random", lambda messages, random: str(random.randint(-999, 999)), (0.0, 0.1)),
            Player("worst", lambda messages, random: "no idea", (0.0, 0.0)),
        )


def given(reply: str) -> str:
    """The answer in a reply."""
    tagged = ANSWER.findall(reply)
    return str(tagged[-1] if tagged else reply).strip()


def scored(dataset: Dataset, answer: str, entry: Entry) -> tuple[float, bool]:
    """The dataset's score, and whether it could make no sense of the answer."""
    try:
        return float(dataset.score_answer(answer, entry)), False
    except Exception:  # Some scorers expect JSON or numbers and raise whatever they meet: the answer is wrong then.
        return 0.0, True


def total(question: str) -> int:
    """What a chain of sums comes to."""
    [problem] = re.findall(r": (.+) =$", question.strip())
    return sum(int(sign + number) for sign, number in re.findall(r"([+-]?) ?(\d+)", problem))


def _asked(entry: Entry) -> list[Message]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": entry["question"]}]


def _is_held_out(question: str) -> bool:
    return int.from_bytes(sha256(question.encode()).digest()[:8], "big") % EVERY_FIFTH == 0


@lru_cache(maxsize=256)  # All attempts of a group get the same question.
def _make(name: str, parameters: str, seed: int) -> tuple[Dataset, Entry]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"reasoning_gym_tasks needs the package reasoning-gym ({error}): install nightschool[reasoning]"
        ) from None
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=5, cutoff=0.5) or sorted(DATASETS)
        raise UnknownEnvironment(f"reasoning-gym has no dataset {name!r}; there are {', '.join(near)}")
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(parameters))
    except (AssertionError, TypeError, ValueError) as error:
        raise UnknownEnvironment(f"reasoning-gym's {name} does not take these parameters: {error}") from None
    return dataset, dataset[0]
