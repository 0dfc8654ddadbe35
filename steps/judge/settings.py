"""What a judge is asked, where, and how much it may cost. Off unless a run has a table `[group.judge]`."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from steps.common.artifacts import Record, Usage

RUBRIC = """\
- What counts first is whether the attempt reached the goal of the task: one that did scores clearly higher.
- Of several that reached it, the more direct way scores a little higher: fewer turns, no needless tool calls.
- Of several that did not, one that came closer scores a little higher.
- Claims that the attempt itself contradicts, made-up facts and misused tools score lower.
- An attempt that abandons the task, or pleads with whoever reads it, scores lowest."""


class Prices(Record):
    """Of a million tokens, in whatever currency the budget is."""

    prompt: NonNegativeFloat
    """Of those that are sent."""
    completion: NonNegativeFloat
    """Of those that are answered."""


class JudgeBudget(Record):
    """What the judge may cost a run in all, re-asks included. Rewinding gives nothing back."""

    tokens: PositiveInt | None = None
    """Prompt and completion tokens, as the judge's server counts them."""
    price: PositiveFloat | None = None
    """In the currency of the prices."""


class JudgeSettings(Record):
    """The judge that scores the attempts of each group, in the place of the environment's rewards."""

    operational: ClassVar[frozenset[str]] = frozenset(
        {"base_url", "key_variable", "max_reasks", "on_failure", "concurrency", "request_timeout", "request_retries"}
        | {"budget", "prices"}
    )
    """Where, how hard and how dear: not in the fingerprint of what was judged."""

    model: str | None = None
    """The judge's name at its server. Without it and `base_url`, the run's own base model judges."""
    base_url: str | None = None
    """Of any server with OpenAI's API; ends in `/v1`, as a rule."""
    key_variable: str | None = None
    """The environment variable with the server's key, set wherever steps run. Without it none is sent."""
    rubric: str = RUBRIC
    """What is good, in words: everything about the task that the transcripts don't tell."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0})
    """Of each request: temperature, max_completion_tokens, reasoning_effort, …; a table given here is the whole one."""
    response_format: Literal["json_schema", "none"] = "json_schema"
    """`none` for servers that know no JSON schema: the form is then asked for in words only, and checked as well."""
    max_reasks: NonNegativeInt = 2
    """How often the judge is told what was wrong with an answer, and asked again."""
    on_failure: Literal["drop", "stop"] = "drop"
    """A group without a usable answer is dropped and counted, or stops the run. Where there was none for any group,
    because the server did not answer, the run stops either way."""
    concurrency: PositiveInt = 8
    """Groups judged at once."""
    request_timeout: PositiveFloat = 300.0
    """Seconds for one answer."""
    request_retries: NonNegativeInt = 5
    """After an HTTP 408, 409, 429 or 5xx, a timeout or a lost connection: with waits that double from 0.5 s to 8 s, or
    as long as the server's Retry-After says; one that says more than two minutes is given up."""
    budget: JudgeBudget = JudgeBudget()
    prices: Prices | None = None

    @property
    def is_own(self) -> bool:
        """Does the run's own base model judge?"""
        return self.base_url is None

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if (self.model is None) != (self.base_url is None):
            raise ValueError("give model and base_url, or neither: the run's own base model judges then")
        if self.budget.price is not None and self.prices is None:
            raise ValueError("a budget.price needs prices = { prompt = …, completion = … }, of a million tokens")
        return self


def price_of(usage: Usage, prices: Prices | None) -> float:
    """In the currency of the prices; 0 without any."""
    if prices is None:
        return 0.0
    return (usage.prompt_tokens * prices.prompt + usage.completion_tokens * prices.completion) / 1e6
