"""The same question to an agent of OpenAI's Agents SDK, which has a tool."""

from difflib import SequenceMatcher

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from environments import Policy, Task

set_tracing_disabled(True)  # so that nothing leaves this machine
BORDERS = {"France": "Spain, Italy, Germany, …", "Peru": "Ecuador, Chile, Brazil, …"}


@function_tool
def neighbours(country: str) -> str:
    """Countries that share a border with this one."""
    return BORDERS.get(country, "not in the atlas")


async def rollout(task: Task, policy: Policy) -> float:
    model = OpenAIChatCompletionsModel(model=policy.model, openai_client=policy.client)
    agent = Agent(name="geographer", instructions="Answer in one word.", model=model, tools=[neighbours])
    try:
        run = await Runner.run(agent, f"What is the capital of {task.data['country']}?", max_turns=4)
    except AgentsException:  # too many turns, or a call that makes no sense: that was the model's doing
        return 0.0
    return SequenceMatcher(None, str(run.final_output), task.data["capital"]).ratio()
