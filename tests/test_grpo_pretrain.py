"""The step `pretrain`: a tiny base model that transformers loads, the same for the same seed, and that learns."""

import json
from pathlib import Path
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from environments import Message
from environments.tic_tac_toe import TicTacToe
from steps.common.artifacts import BaseModelFiles
from steps.common.errors import InvalidInputs
from steps.common.settings import EnvironmentSettings
from steps.grpo.tokenizer import Encoder
from steps.initialize import INITIALIZE, InitializeInputs
from steps.pretrain import PRETRAIN, PretrainInputs, PretrainSettings

pytestmark = pytest.mark.train

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"item": "näils", "n": 2}}}}\n</tool_call>'

TINY = PretrainSettings(
    hidden_size=32, layers=1, heads=2, key_value_heads=1, mlp_size=64, steps=20, batch_size=4, warmup_steps=5
)


def pretrain(root: Path, seed: int = 0, name: str = "tic_tac_toe", **changes: int) -> BaseModelFiles:
    settings = TINY.model_copy(update=changes)
    inputs = PretrainInputs(environment=EnvironmentSettings(name=name), settings=settings, seed=seed)
    return PRETRAIN.run(inputs, root, "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseModelFiles]:
    root = tmp_path_factory.mktemp("run")
    return root, pretrain(root)


def tokenizer_of(root: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(root / "model")
    return tokenizer


def test_the_model_loads_and_knows_where_a_turn_ends(made: tuple[Path, BaseModelFiles]) -> None:
    root, files = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(root / "model"), tokenizer_of(root)
    assert model.num_parameters() == files.parameters
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == TINY.context
    assert len(tokenizer) <= model.config.vocab_size


def test_training_renders_conversations_as_the_template_does(made: tuple[Path, BaseModelFiles]) -> None:
    tokenizer = tokenizer_of(made[0])
    conversation = next(iter(TicTacToe().demonstrations(Random(3))))
    ids, spoken = Encoder(tokenizer)(conversation)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == text
    assert ids == tokenizer.apply_chat_template(conversation, return_dict=False)
    said = tokenizer.decode([token for token, own in zip(ids, spoken, strict=True) if own])
    assert said == "".join(f"{m['content']}<|im_end|>" for m in conversation if m["role"] == "assistant")
    turn = conversation[:2]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt


def test_a_conversation_with_tools_is_one_sequence_that_grows(made: tuple[Path, BaseModelFiles]) -> None:
    tokenizer = tokenizer_of(made[0])
    calls = [{"function": {"name": name, "arguments": {"item": "näils", "n": 2}}} for name in ("find", "buy")]
    opening: list[Message] = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    prompt = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_dict=False)
    for content, before in (("", ""), (None, ""), ("Let me see.\n", "Let me see.\n")):
        answer = f"{before}{CALL.format('find')}\n{CALL.format('buy')}<|im_end|>"
        seen = [*prompt, *tokenizer.encode(answer, add_special_tokens=False)]
        said: Message = {"role": "assistant", "content": content, "tool_calls": calls}  # as vLLM's parser reads it
        later = [*opening, said, {"role": "tool", "content": "3", "tool_call_id": "1"}]
        grown = tokenizer.apply_chat_template(later, add_generation_prompt=True, return_dict=False)
        assert grown[: len(seen)] == seen
        assert tokenizer.decode(grown[len(seen) :]) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
        as_api = [
            {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}} for call in calls
        ]
        ids, spoken = Encoder(tokenizer)([*later[:2], said | {"tool_calls": as_api}, later[3]])
        assert ids == tokenizer.apply_chat_template(later, return_dict=False)
        assert [token for token, own in zip(ids, spoken, strict=True) if own] == seen[len(prompt) :]


def test_a_cell_is_one_token_and_every_board_has_as_many(made: tuple[Path, BaseModelFiles]) -> None:
    tokenizer = tokenizer_of(made[0])
    assert len(tokenizer.encode("b2")) == 1
    boards = ("X b1 c1\nO b2 c2\na3 b3 c3", "a1 b1 c1\na2 b2 c2\na3 b3 c3", "X O X\nO X O\na3 b3 c3")
    assert len({len(tokenizer.encode(board)) for board in boards}) == 1
    assert tokenizer.decode(tokenizer.encode(" any tëxt\n")) == " any tëxt\n"


def test_a_seed_makes_one_model(made: tuple[Path, BaseModelFiles], tmp_path: Path) -> None:
    assert pretrain(tmp_path / "same").digest == made[1].digest
    assert pretrain(tmp_path / "other", seed=1).digest != made[1].digest


def test_more_steps_learn_more(made: tuple[Path, BaseModelFiles], tmp_path: Path) -> None:
    assert pretrain(tmp_path, steps=60).metrics["loss"] < 0.8 * made[1].metrics["loss"]


def test_a_run_starts_from_it(made: tuple[Path, BaseModelFiles]) -> None:
    root, files = made
    inputs = InitializeInputs(base_model=files.path, base_digest=files.digest)
    checkpoint = INITIALIZE.run(inputs, root, "checkpoints/0000")
    config = json.loads((root / checkpoint.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "model"


def test_what_cannot_be_pretrained_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputs, match="no_such"):
        pretrain(tmp_path, name="no_such")
    with pytest.raises(InvalidInputs, match="more than pretrain's context of 16"):
        pretrain(tmp_path, context=16)
