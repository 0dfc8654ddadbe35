"""Examples as tokens: what a server would show the model, and what the model is to answer.

A chat is rendered by the model's own template, turn by turn: the prompt is what the template makes of all messages
before an answer when it is asked for one, exactly as a server asks; the answer is what the template adds to that when
it is given the answer too, up to the end of the turn. So the mask needs no markers in the template, and no prompt is
trained on that a server would not send. As with recorded rollouts, a prompt that does not extend what came before (a
template that drops earlier thinking) starts a new sequence.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import TemplateError

from steps.common.errors import InvalidInputs
from steps.common.tables import read
from steps.examples.best import SEQUENCE_COLUMNS, SEQUENCES
from steps.examples.chats import CHATS, Chat, stored_chats
from steps.grpo.batch import Example


def read_examples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, base_model: str, max_tokens: int
) -> tuple[list[Example], Counter[str]]:
    """The sequences of a `Demonstrations`, and how many were left out, by reason.

    Raises `InvalidInputs` where all were, or the template can't tell what the assistant says.
    """
    if (folder / CHATS).exists():
        template = ChatTemplate(tokenizer, base_model)
        found: Iterator[Example] = (
            example for i, chat in enumerate(stored_chats(folder / CHATS)) for example in template(chat, i)
        )
    else:
        found = _recorded(folder / SEQUENCES)
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    for example in found:
        if len(example) > max_tokens:
            dropped["too_long"] += 1
        elif not any(example.mask[1:]):
            dropped["nothing_sampled"] += 1
        else:
            examples.append(example)
    if not examples:
        raise InvalidInputs(f"sft.max_tokens = {max_tokens}: of {dropped.total()} examples none is short enough")
    return examples, dropped


def _recorded(file: Path) -> Iterator[Example]:
    for row in read([file], SEQUENCE_COLUMNS).iter_rows(named=True):
        yield Example((f"{row['iteration']}/{row['task_id']}", row["attempt"]), row["token_ids"], row["mask"])


class ChatTemplate:
    """A model's chat template, which tells what the assistant says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, base_model: str) -> None:
        """Raises `InvalidInputs` where the model has none."""
        self._tokenizer, self._name = tokenizer, base_model
        self._ends = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        if not tokenizer.chat_template:
            raise InvalidInputs(f"{base_model} has no chat template: take the model's variant that was made for chats")

    def __call__(self, chat: Chat, number: int) -> list[Example]:
        """The chat as sequences, the assistant's turns with their ends masked True.

        Raises `InvalidInputs` where the template renders an answer otherwise than it asks for one, or does not end it.
        """
        messages = [message.model_dump(exclude_none=True) for message in chat.messages]
        sequences: list[tuple[list[int], list[bool]]] = []
        for turn in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            prompt, answer = self._turn(messages[: turn + 1], chat.tools, number)
            if not sequences or prompt[: len(sequences[-1][0])] != sequences[-1][0]:
                sequences.append(([], []))
            ids, mask = sequences[-1]
            mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids += prompt[len(ids) :] + answer
        return [Example(("chat", number), ids, mask) for ids, mask in sequences]

    def _turn(self, messages: list[Any], tools: list[Any] | None, number: int) -> tuple[list[int], list[int]]:
        """Tokens of the prompt for the last message, and of that itself."""
        asked = self._render(messages[:-1], tools, number, ask=True)
        whole = self._render(messages, tools, number).rstrip()
        if not whole.startswith(asked) or whole == asked:
            raise self._unfit(
                number, f"renders the answer in message {len(messages) - 1} otherwise than it asks for it"
            )
        prompt, ids = self._encode(asked), self._encode(whole)
        # Where a token would reach over the end of the prompt, a server has two.
        is_whole = ids[: len(prompt)] == prompt
        answer = ids[len(prompt) :] if is_whole else self._encode(whole.removeprefix(asked))
        if answer[-1] not in self._ends:
            raise self._unfit(number, "does not end the assistant's turn with a token of its own")
        return prompt, answer

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _render(self, messages: list[Any], tools: list[Any] | None, number: int, ask: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise self._unfit(number, f"can't render it ({error})") from None
        return cast(str, text)

    def _unfit(self, number: int, what: str) -> InvalidInputs:
        return InvalidInputs(
            f"the chat template of {self._name} can't take chat {number}, counted from 0: it {what}. "
            f"Write the chat as that template has it, or put a template that fits into the model's folder"
        )
