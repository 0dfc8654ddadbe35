"""E-mail search by an agent of LangGraph: the mails, questions, tools and rewards of `email_search`.

The agent is written as for any server of OpenAI's API; of Nightschool it knows an address, a key and a model's name.
It is a ReAct loop, LangGraph's `ToolNode` and a model in turns, so some things are the framework's: all calls of a turn
are made, and who asked for too much is stopped by the graph's recursion limit.

Asked and rewarded as in `email_search`. Turns: at most 10.

It needs the packages `langgraph` and `langchain-openai`, of the extra `agents`, where rollouts run.
"""

import importlib.util
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt, SecretStr, ValidationError

from environments._mail_attempt import TOOLS, Attempt, Ending
from environments._mail_environment import MailEnvironment
from environments.base import Policy, Result, Task, UnknownEnvironment

if TYPE_CHECKING:
    from langchain_core.messages import AnyMessage, ToolMessage
    from langchain_core.runnables import RunnableConfig
    from langchain_core.tools import BaseTool
    from langchain_openai import ChatOpenAI
    from langgraph.graph.state import CompiledStateGraph

PACKAGES = ("langgraph", "langchain_openai")


def react_agent(model: "ChatOpenAI", tools: "Sequence[BaseTool]", last_tool: str) -> "CompiledStateGraph[Any]":
    """Asks the model and runs the tools it calls, until it calls none, a call can't be made, or `last_tool` was run."""
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    bound = model.bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    def goes_on(state: MessagesState) -> str:
        answers = tool_answers(state["messages"])
        return END if any(a.status == "error" or a.name == last_tool for a in answers) else "model"

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, ["tools", END])
    graph.add_conditional_edges("tools", goes_on, ["model", END])
    return graph.compile()


def tool_answers(messages: "Sequence[AnyMessage]") -> "list[ToolMessage]":
    """What the tools answered last."""
    from langchain_core.messages import ToolMessage

    answers: list[ToolMessage] = []
    for message in reversed(messages):
        if not isinstance(message, ToolMessage):
            break
        answers.insert(0, message)
    return answers


class EmailSearchLangGraph(MailEnvironment):
    """An agent of LangGraph with tools for an inbox."""

    test_tasks: PositiveInt = 32
    """Held-out tasks at most, where the mails are made up."""

    async def rollout(self, task: Task, policy: Policy) -> Result:
        _check_packages()
        from langgraph.errors import GraphRecursionError

        attempt, messages = self.attempt(task), list["AnyMessage"]()
        async with langchains(policy) as model:
            agent = react_agent(model, mail_tools(attempt), last_tool="return_final_answer")
            # A turn is two steps of the graph: the model and its tools.
            limit: RunnableConfig = {"recursion_limit": 2 * self.max_turns}
            asked = {"messages": self.opening(attempt.question)}
            try:
                async for state in agent.astream(asked, limit, stream_mode="values"):
                    messages = state["messages"]
            except GraphRecursionError:
                pass  # `ending_of` sees it: the tools had the last word
            except ValidationError:  # LangChain's own, of arguments that are JSON but no object
                attempt.ending = "bad_arguments"
        attempt.ending = attempt.ending or ending_of(messages)
        attempt.turns = sum(message.type == "ai" for message in messages)
        return await self.result(attempt)

    def demonstrated_tools(self) -> "Sequence[dict[str, Any]]":
        _check_packages()
        from langchain_core.utils.function_calling import convert_to_openai_tool

        attempt = self.attempt(self.tasks("train")[0])  # any will do: nothing is called
        return [convert_to_openai_tool(tool) for tool in mail_tools(attempt)]


def mail_tools(attempt: Attempt) -> "list[BaseTool]":
    """The tools as LangChain has them."""
    from langchain_core.tools import StructuredTool

    def runs(name: str) -> Callable[..., Coroutine[Any, Any, str]]:
        async def run(**arguments: Any) -> str:
            return attempt.call(name, arguments)

        return run

    return [
        StructuredTool.from_function(coroutine=runs(name), name=name, description=model.__doc__, args_schema=model)
        for name, model in TOOLS.items()
    ]


def ending_of(messages: "Sequence[AnyMessage]") -> Ending:
    """How an agent ended that has not answered."""
    answers = tool_answers(messages)
    bad = [answer.name for answer in answers if answer.status == "error"]
    if answers and not bad:
        return "out_of_turns"
    bad += [call["name"] for call in getattr(messages[-1], "invalid_tool_calls", ())]
    if not bad:
        return "no_call"
    return "bad_arguments" if bad[0] in TOOLS else "unknown_tool"


@asynccontextmanager
async def langchains(policy: Policy) -> "AsyncIterator[ChatOpenAI]":
    """The policy as LangChain has it. Left alone it makes connections, keeps them, and reads certificates for each."""
    from langchain_openai import ChatOpenAI
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

    options: dict[str, Any] = {"verify": _certificates(), "trust_env": False}
    async with DefaultAsyncHttpxClient(**options) as client:
        with DefaultHttpxClient(**options) as never_used:
            yield ChatOpenAI(
                model=policy.model,  # type: ignore[call-arg]
                base_url=policy.base_url,
                api_key=SecretStr(policy.api_key),
                http_async_client=client,
                http_client=never_used,
            )


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _check_packages() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UnknownEnvironment(f"email_search_langgraph needs {', '.join(missing)}: install nightschool[agents]")
