"""Makes a tiny random chat model and three adapters of it, each with the probe that a trainer would write.

Run by the Python of .venvs/train: `make_tiny_model.py FOLDER` fills FOLDER/model and FOLDER/checkpoints/0000 … 0002.
The tokenizer knows bytes and nothing more, so any text goes in and whatever the model samples comes out.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocabulary: int, end: int, pad: int) -> Qwen3ForCausalLM:
    """Two layers; vLLM's attention on a CPU wants heads of at least 32."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            initializer_range=0.2,
            eos_token_id=end,
            pad_token_id=pad,
        )
    ).eval()


@torch.no_grad()
def nudge(model: PeftModel, size: float) -> None:
    """Moves the adapter by about `size`: a first update where it is large, a later one where it is small."""
    for name, weight in model.named_parameters():
        if "lora_B" in name or ("lora_A" in name and size < 0.01):
            weight += size * torch.randn_like(weight)


@torch.no_grad()
def logprobs(model: torch.nn.Module, token_ids: list[int]) -> list[float]:
    """Log-probability of each token but the first."""
    ids = torch.tensor([token_ids])
    scores = model(ids).logits.log_softmax(-1)
    return scores[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    base = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    base.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (24, 40)]
    under_base = [logprobs(base, text) for text in texts]
    policy, previous = get_peft_model(base, LORA), None
    for version, size in enumerate((0.0, 0.1, 1e-3)):
        nudge(policy, size)
        now = [logprobs(policy, text) for text in texts]
        checkpoint = folder / f"checkpoints/{version:04d}"
        policy.save_pretrained(checkpoint)
        rows = zip(texts, now, previous or [None] * len(texts), under_base, strict=True)
        sequences = [dict(zip(("token_ids", "logprobs", "previous", "base"), row, strict=True)) for row in rows]
        (checkpoint / "probe.json").write_text(json.dumps({"dtype": "float32", "sequences": sequences}))
        previous = now


if __name__ == "__main__":
    main(Path(sys.argv[1]))
