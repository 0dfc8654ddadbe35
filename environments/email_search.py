"""E-mail search: find the answer to a question in an inbox, and the mails that it comes from.

Asked: a question about an inbox, "What is the budget for Azure Fox?". The agent calls one of three tools a turn:
`search_inbox` (keywords, and if wanted sender, recipient, first day, day after the last; at most 10 hits in brief),
`read_email`, and `return_final_answer` with the answer and the `message_ids` it comes from. Of several calls in a turn
the first one counts. An answer is right if it is the known one, but for capitals, articles, marks and spaces, or if a
judge says so, where one is configured. Turns: at most 10.

Rewarded, as in OpenPipe ART's ART-E (examples/art-e): p = 0.1 [the source was among the hits] + 0.1 [it was read] +
0.1 [no mail was asked for that isn't there] + 0.1 [the answer names the source], and

    a reply without a call that can be parsed       -2 + p
    a tool that there isn't                       -1.9 + p
    arguments that the tool can't take            -1.8 + p
    a wrong answer                                  -1 + p
    "I don't know"                                   0 + p
    no answer after all turns                        0 + p
    the right answer    1 + 0.3 [it names the source] + 0.1 / (mails it names, 0 if none) + 0.1 (1 - turns / 10)

Here some answers need two mails, and "the source" is both; and some questions can't be answered, where "I don't know"
is the right answer, and to name no mail the right source.

The mails are made up (`_mail_corpus.py`), the same for the same seed, and a quarter of the inboxes is held out; or
they are the public Enron mails, with a file of questions.
"""

from collections.abc import Sequence
from typing import Any, Literal

from environments._mail_attempt import Question, openai_tools
from environments._mail_environment import MailEnvironment
from environments._tool_calls import told
from environments.base import Message, Policy, Result, Task


class EmailSearch(MailEnvironment):
    """An agent with tools for an inbox."""

    tool_calls: Literal["native", "text"] = "native"
    """How the model is told of tools and calls them: by its chat template and the server's parser
    (`serve.tool_call_parser`), or in the text of the messages, for models whose template has no tools."""

    @property
    def is_native(self) -> bool:
        return self.tool_calls == "native"

    async def rollout(self, task: Task, policy: Policy) -> Result:
        attempt = self.attempt(task)
        messages = self.opening(attempt.question)
        tools: dict[str, Any] = {"tools": openai_tools()} if self.is_native else {}
        while not attempt.ending:
            reply = await policy.chat(messages, **tools)
            messages.append({key: reply[key] for key in ("role", "content", "tool_calls") if reply.get(key)})
            messages += attempt.take(reply)
        return await self.result(attempt)

    def demonstrated_tools(self) -> Sequence[dict[str, Any]]:
        return openai_tools() if self.is_native else ()

    def opening(self, question: Question) -> list[Message]:
        system, *rest = super().opening(question)
        if not self.is_native:
            system = {**system, "content": f"{system['content']}\n{told(openai_tools())}"}
        return [system, *rest]
