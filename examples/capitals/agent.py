"""Asks for a capital. An answer is worth how close it comes to the city's name and nothing else."""

from difflib import SequenceMatcher

from environments import Policy, Result, Task


async def rollout(task: Task, policy: Policy) -> Result:
    question = f"What is the capital of {task.data['country']}? Answer in one word."
    reply = await policy.client.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": question}]
    )
    answer = reply.choices[0].message.content or ""
    closeness = SequenceMatcher(None, answer, task.data["capital"]).ratio()
    return Result(reward=closeness, metrics={"characters": len(answer)})
