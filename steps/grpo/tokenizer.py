"""A byte-level BPE tokenizer with a ChatML template, learnt from an environment's own messages.

It is trained on the messages' words, not on rendered conversations: there `c3<|im_end|>` would be one word and block
merges. Words keep the space before them and a line break stands alone: every word of a small world becomes one token.

Tool calls are written as Hermes has them, after the message's content and with nothing added to that: what a server's
`hermes` parser took out of an answer is put back as it was, so that the next prompt extends it.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from environments import Message

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = r"\n| ?[^\s]+| "
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ '' if loop.first else '\n' }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    conversations: Sequence[Sequence[Message]], max_vocabulary: int, context: int
) -> PreTrainedTokenizerFast:
    """Merges until the words of `conversations` are whole or `max_vocabulary` is reached; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocabulary,
        special_tokens=[AddedToken(text, special=True) for text in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHATML,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _texts(conversations: Iterable[Sequence[Message]]) -> Iterable[str]:
    for conversation in conversations:
        for message in conversation:
            yield str(message["role"])
            yield _said(message)


def _said(message: Message) -> str:
    """What the template has between a message's role and its end."""
    return (message.get("content") or "") + "\n".join(map(_call, message.get("tool_calls") or []))


def _call(call: Message) -> str:
    """A call whose arguments are an object or, as OpenAI's API has it, the JSON of one, which servers read."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


class Encoder:
    """Renders conversations as tokens; what was seen before is not tokenized again."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokens = lru_cache(maxsize=1 << 16)(lambda text: tokenizer.encode(text, add_special_tokens=False))

    def __call__(self, conversation: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids as the template has them, and which of them the assistant says, its end included."""
        ids: list[int] = []
        spoken: list[bool] = []
        for message in conversation:
            own = message["role"] == "assistant"
            parts = ((f"{START}{message['role']}\n", False), (f"{_said(message)}{END}", own), ("\n", False))
            for text, said in parts:
                tokens = self._tokens(text)
                ids += tokens
                spoken += [said] * len(tokens)
        return ids, spoken
