"""The line to the judge's server: OpenAI's client, its errors in this project's words, and each answer paid for once.

The client itself tries again, a bounded number of times and as Retry-After says. What is left is an `Unanswered`, which
may be luck and concerns one group, or an `InvalidInputs`, which concerns them all.
"""

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Self

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from steps.agent import upstream
from steps.common.artifacts import Usage
from steps.common.errors import InvalidInputs
from steps.judge.ledger import Answer, Ledger, key_of
from steps.judge.settings import JudgeSettings


class Unanswered(Exception):
    """The server gave no answer to a request. The message says why in a few words, without addresses."""


class JudgeClient:
    """One client, shared by all groups. Use it as an async context manager."""

    def __init__(self, settings: JudgeSettings, ledger: Ledger) -> None:
        url, key = address_of(settings)
        self._client = AsyncOpenAI(
            base_url=url, api_key=key, timeout=settings.request_timeout, max_retries=settings.request_retries
        )
        self._settings, self._ledger, self._url = settings, ledger, url
        self._model: str | None = settings.model
        self._broken: InvalidInputs | None = None
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Groups that ask for the same are told the same, the later ones once the first has its answer."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, request: Mapping[str, Any]) -> Answer:
        """The answer to `request`, from the ledger where it is there.

        Raises `Unanswered`, `BudgetSpent`, `CorruptArtifact`, and `InvalidInputs` where no request can be answered:
        from then on none is sent.
        """
        key = key_of({"model": self._settings.model, **request})
        async with self._turns[key]:
            if known := self._ledger.find(key):
                return known
            if self._broken:
                raise self._broken
            self._ledger.check_budget()
            try:
                answer = await self._send(key, request)
            except InvalidInputs as error:
                self._broken = error
                raise
            self._ledger.keep(answer)
            return answer

    async def _send(self, key: str, request: Mapping[str, Any]) -> Answer:
        try:
            model = self._model = self._model or await self._base_model()
            more = {name: value for name, value in request.items() if name != "messages"}
            completion = await self._client.chat.completions.create(
                model=model, messages=request["messages"], extra_body=more
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            variable = self._settings.key_variable or "no variable: group.judge.key_variable is not set"
            raise InvalidInputs(
                f"the judge's server refuses the model {self._model} or its key, from {variable} "
                f"({self._url}): {_told(error)}"
            ) from None
        except openai.APIStatusError as error:
            raise Unanswered(_told(error)) from None
        except openai.APITimeoutError:
            raise Unanswered(f"no answer within {self._settings.request_timeout:g} s") from None
        except openai.APIError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        except json.JSONDecodeError:
            raise Unanswered("an answer that is no JSON") from None
        return self._answer(key, completion)

    def _answer(self, key: str, completion: Any) -> Answer:
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            raise Unanswered("an answer that is no chat completion")
        budget, usage = self._settings.budget, completion.usage
        if usage is None and (budget.tokens or budget.price):
            raise InvalidInputs("the judge's server counts no tokens, so no budget can be kept: take it away")
        choice = completion.choices[0]
        return Answer(
            request=key,
            model=completion.model,
            content=choice.message.content,
            cut=choice.finish_reason == "length",
            usage=Usage(
                answers=1,
                prompt_tokens=usage.prompt_tokens if usage else 0,
                completion_tokens=usage.completion_tokens if usage else 0,
            ),
        )

    async def _base_model(self) -> str:
        """The model of vLLM's that is no adapter."""
        models = [model async for model in self._client.models.list()]
        return next(model.id for model in models if not (model.model_extra or {}).get("parent"))


def address_of(settings: JudgeSettings, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The judge's address and key. Raises `InvalidInputs` where the environment does not say."""
    if settings.base_url is None:  # the flow has the run's own server up
        policy = upstream.Endpoint.from_environment(environment)
        return policy.url, policy.key
    if settings.key_variable is None:
        return settings.base_url, "none"
    if key := environment.get(settings.key_variable):
        return settings.base_url, key
    raise InvalidInputs(f"{settings.key_variable}, which group.judge.key_variable names, is not set where steps run")


def _told(error: openai.APIStatusError) -> str:
    """The server's own words, on one line."""
    body = error.body if isinstance(error.body, dict) else {}
    words = " ".join(str(body.get("message") or error.message).split())
    return f"HTTP {error.status_code}: {words[:200]}"
