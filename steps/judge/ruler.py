"""Groups in, scores out: who is sent to the judge, how often it is asked again, and what happens where it fails.

A group is sent only where there is something to compare: attempts enough to be trained on, and not all the same.
Attempts with equal messages are shown once and get the same score.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.base import Trajectory, TrajectoryGroup
from steps.common.errors import InvalidInputs, ServerFault
from steps.common.progress import Progress
from steps.judge.client import JudgeClient, Unanswered
from steps.judge.ledger import Answer, Ledger
from steps.judge.prompt import asked_again, names, question
from steps.judge.settings import JudgeSettings
from steps.judge.verdicts import BadAnswer, Verdict, verdicts_in

SHORT, IDENTICAL, FAILED = "short_group", "identical", "judge_failed"
"""Why a group has no scores."""


@dataclass
class Ruling:
    """What became of one group."""

    group: TrajectoryGroup
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """By attempt."""
    dropped: str | None = None
    """Why it has none."""
    answers: list[Answer] = field(default_factory=list)
    """That it took, whenever they were paid. Groups may share some."""
    unanswered: bool = False
    """Was it the server that failed, and not its answers?"""


async def rule(
    groups: Sequence[TrajectoryGroup], settings: JudgeSettings, min_attempts: int | None, ledger: Ledger
) -> list[Ruling]:
    """Judges groups side by side. Whatever stops it, answers that are under way are waited for and kept.

    Raises `BudgetSpent`, `InvalidInputs` where no request can be answered, and as `settings.on_failure` says.
    """
    slots, progress, done = asyncio.Semaphore(settings.concurrency), Progress(len(groups), "groups"), 0

    async def one(group: TrajectoryGroup) -> Ruling:
        nonlocal done
        async with slots:
            ruling = await _rule_one(client, group, settings, min_attempts)
        done += 1
        progress.show(done, tokens=f"{ledger.spent.tokens:,}")
        return ruling

    async with JudgeClient(settings, ledger) as client:
        outcomes = await asyncio.gather(*map(one, groups), return_exceptions=True)
    rulings = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        rulings.append(outcome)
    _check(rulings, settings)
    return rulings


async def _rule_one(
    client: JudgeClient, group: TrajectoryGroup, settings: JudgeSettings, min_attempts: int | None
) -> Ruling:
    alive = [trajectory for trajectory in group.trajectories if trajectory.failure is None]
    distinct = list(dict.fromkeys(map(_key, alive)))
    if len(alive) < max(2, min_attempts or len(group.trajectories)):
        return Ruling(group, dropped=SHORT)
    if len(distinct) < 2:
        return Ruling(group, dropped=IDENTICAL)
    ruling = Ruling(group)
    try:
        verdicts = dict(zip(distinct, await _ask(client, distinct, settings, ruling), strict=True))
        ruling.verdicts = {trajectory.attempt: verdicts[_key(trajectory)] for trajectory in alive}
    except (BadAnswer, Unanswered) as error:
        ruling.dropped, ruling.unanswered = f"{FAILED}: {error}", isinstance(error, Unanswered)
        print(f"judge failed: task {group.task.id}: {error}", flush=True)
    return ruling


async def _ask(client: JudgeClient, attempts: Sequence[str], settings: JudgeSettings, ruling: Ruling) -> list[Verdict]:
    """Asks until an answer can be used. Raises `BadAnswer` where none can."""
    request = question(settings, [json.loads(attempt) for attempt in attempts])
    for reasks_left in range(settings.max_reasks, -1, -1):
        answer = await client.ask(request)
        ruling.answers.append(answer)
        try:
            if answer.cut:
                raise BadAnswer("it was cut off at its greatest length: explain more briefly")
            return verdicts_in(answer.content, names(len(attempts)))
        except BadAnswer as error:
            if not reasks_left:
                raise
            request = asked_again(request, answer.content, str(error))
    raise AssertionError("unreachable")


def _key(trajectory: Trajectory) -> str:
    return json.dumps(trajectory.messages)


def _check(rulings: Sequence[Ruling], settings: JudgeSettings) -> None:
    """Raises where what failed is more than a group to be dropped."""
    failed = [ruling for ruling in rulings if (ruling.dropped or "").startswith(FAILED)]
    unanswered = [ruling for ruling in failed if ruling.unanswered]
    nobody = bool(unanswered) and not any(ruling.verdicts for ruling in rulings)
    if not failed or not (nobody or settings.on_failure == "stop"):
        return
    first = (unanswered or failed)[0]
    what = f"the judge failed for {len(failed)} of {len(rulings)} groups, as for task {first.group.task.id}"
    why = (first.dropped or "").removeprefix(f"{FAILED}: ")
    if unanswered:
        raise ServerFault(f"{what}: {why}; run the same command once it is well, which asks nothing twice")
    raise InvalidInputs(f"{what}: {why}; raise group.judge.max_reasks, or take another judge")
