"""The step `sft`: its loss and gradient, what it trains on, and what the checkpoint that it makes is to a run."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_fixtures import LORA, make_base, ragged_rows, train_inputs, write_batch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from steps.common import layout
from steps.common.artifacts import Checkpoint, Demonstrations, read_artifact
from steps.common.errors import InvalidInputs
from steps.common.models import PROBE, Probe, digest_of_model, link_base
from steps.common.origin import origin_of
from steps.common.runs import RUNS, RunRecord, write_record
from steps.common.step import Workspace
from steps.common.storage import sha256_of
from steps.demonstrations import DEMONSTRATIONS, DemonstrationsInputs, FromChats
from steps.examples.chats import Chat
from steps.fork import ForkInputs, make_run
from steps.grpo.adapter import REFERENCE, WEIGHTS, add_reference, load_weights
from steps.grpo.batch import Example, read_rows
from steps.grpo.examples import ChatTemplate, read_examples
from steps.grpo.imitation import make_trainer
from steps.grpo.imitation_trainer import ImitationTrainer
from steps.grpo.model import load_tokenizer, prepare_torch
from steps.grpo.update import make_trainer as make_update_trainer
from steps.initialize import INITIALIZE, InitializeInputs
from steps.sft import SFT, SftInputs, SftSettings
from steps.train import TRAIN, TrainInputs

pytestmark = pytest.mark.train

TOOL_CALL = {"function": {"name": "find", "arguments": '{"item": "näils"}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]},
    {
        "messages": [
            {"role": "system", "content": "b"},
            {"role": "user", "content": "a b c a b c"},
            {"role": "assistant", "content": "c c b"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b a"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL, TOOL_CALL]},
            {"role": "tool", "content": "c", "tool_call_id": "call-1"},
            {"role": "assistant", "content": "a"},
        ]
    },
]


def write_chats(file: Path, chats: list[dict[str, Any]]) -> FromChats:
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return FromChats(sha256=sha256_of(file))


def gather(root: Path, chats: list[dict[str, Any]] = CHATS) -> Demonstrations:
    """Chats from a file, as a run's demonstrations."""
    source = write_chats(root / "chats.jsonl", chats)
    inputs = DemonstrationsInputs(source=source, where=root / "chats.jsonl")
    return DEMONSTRATIONS.run(inputs, root, layout.DEMONSTRATIONS)


def inputs_of(root: Path, **settings: Any) -> SftInputs:
    plain = {"learning_rate": 0.02, "warmup": 0.0, "batch_size": 2}
    return SftInputs(
        base_model=layout.BASE,
        base_digest=digest_of_model(root / layout.BASE),
        lora=LORA,
        demonstrations=read_artifact(Demonstrations, root, layout.DEMONSTRATIONS),
        settings=SftSettings(**(plain | settings)),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a tiny base model, with demonstrations and no checkpoint."""
    folder = tmp_path_factory.mktemp("sft")
    make_base(folder / "model")
    root = folder / "runs/first"
    root.mkdir(parents=True)
    link_base(root, folder / "model", digest_of_model(folder / "model"))
    write_record(root, RunRecord(config={"name": "first", "iterations": 9, "sft": {"demonstrations": 3}}, versions={}))
    gather(root)
    return root


@pytest.fixture(scope="module")
def first(root: Path) -> Checkpoint:
    """Checkpoint 0, of two epochs."""
    return SFT.run(inputs_of(root, epochs=2), root, layout.checkpoint(0))


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(root, layout.BASE)


def trainer_of(root: Path, examples: list[Example], **settings: Any) -> ImitationTrainer:
    """A trainer whose adapter is not the untrained one: that has no gradient in half of its weights."""
    prepare_torch()
    trainer = make_trainer(
        inputs_of(root, **settings), Workspace(root, "x", root / "out"), load_tokenizer(root, layout.BASE), examples
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    trainer.current_gradient_accumulation_steps = 1  # as transformers' loop sets it
    return trainer


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradient_are_those_of_the_mean_over_what_the_assistant_says(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    examples, dropped = read_examples(root / layout.DEMONSTRATIONS, tokenizer, "model", 4096)
    assert (len(examples), dropped.total()) == (3, 0)
    trainer = trainer_of(root, examples, batch_size=3, tokens_per_micro_batch=60)
    [batch] = trainer.batches
    assert len(batch.parts) > 1, "the mean must not depend on how a batch is cut"
    loss = trainer.training_step(trainer.model, batch)
    gradients = gradients_of(trainer.model)

    trainer.model.zero_grad()
    model = trainer.model.double().eval()
    losses, hits = [], 0
    for example in examples:
        ids, said = torch.tensor([example.token_ids]), torch.tensor(example.mask[1:])
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses.append(-scores.gather(1, ids[0, 1:, None])[said, 0])
        hits += int((scores.argmax(-1) == ids[0, 1:])[said].sum())
    expected = torch.cat(losses).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-5)
    wanted = gradients_of(trainer.model)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient.double(), wanted[name], atol=1e-5, rtol=1e-4), name
    tokens = sum(sum(example.mask) for example in examples)
    assert batch.tokens == tokens
    metrics = trainer.metrics()
    assert (metrics["loss"], metrics["token_accuracy"]) == (pytest.approx(float(loss)), pytest.approx(hits / tokens))


def test_tokens_outside_of_the_mask_are_not_trained(root: Path) -> None:
    """What stands after the last answer is seen by no trained token: other tokens there change no bit."""
    examples = [Example(("a", i), [5, 6, 7, 8, 9 + i, 20, 21], [i > 2 and i < 5 for i in range(7)]) for i in range(2)]
    others = [replace(example, token_ids=[*example.token_ids[:5], 99, 98]) for example in examples]
    gradients = []
    for rows in (examples, others):
        trainer = trainer_of(root, rows)
        trainer.training_step(trainer.model, trainer.batches[0])
        gradients.append(gradients_of(trainer.model))
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_no_step_of_the_schedule_has_the_rate_zero(root: Path) -> None:
    examples = [Example(("a", i), [5, 6, 7], [False, True, True]) for i in range(8)]
    trainer = trainer_of(root, examples, batch_size=2, warmup=0.5, learning_rate=1.0)
    trainer.create_optimizer_and_scheduler(len(trainer.batches))
    rates = []
    for _ in trainer.batches:
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1 / 2])


def test_the_assistants_turns_are_masked_as_a_server_asks_for_them(tokenizer: PreTrainedTokenizerBase) -> None:
    for chat in CHATS:
        messages = Chat.model_validate(chat).messages
        [example] = ChatTemplate(tokenizer, "model")(Chat.model_validate(chat), 0)
        plain = [message.model_dump(exclude_none=True) for message in messages]
        whole = tokenizer.apply_chat_template(plain, return_dict=False)
        assert example.token_ids == whole[: len(example.token_ids)]
        assert tokenizer.decode(whole[len(example.token_ids) :]) == "\n", "the end of the last turn is said, no more"
        said = tokenizer.decode([t for t, m in zip(example.token_ids, example.mask, strict=True) if m])
        answers = [message for message in messages if message.role == "assistant"]
        assert said.count("<|im_end|>") == len(answers)
        assert all(answer.content in said for answer in answers)
    assert '<tool_call>\n{"name": "find", "arguments": {"item": "näils"}}\n</tool_call>\n<tool_call>' in said


IN_LATER_TURNS_CUT = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content[:1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>{% endfor %}"
)
ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "model has no chat template"),
        (
            IN_LATER_TURNS_CUT + "{% if add_generation_prompt %}[assistant]<think>{% endif %}",
            "can't take chat 7, counted from 0: it renders the answer in message 2 otherwise than it asks for it",
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + ASK,
            "does not end the assistant's turn with a token of its own",
        ),
        ("{{ raise_exception('only one turn') }}", r"can't render it \(only one turn\)"),
    ],
)
def test_a_template_that_can_not_tell_is_named(
    tokenizer: PreTrainedTokenizerBase, template: str | None, why: str
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(InvalidInputs, match=why):
        ChatTemplate(other, "model")(Chat.model_validate(CHATS[1]), 7)


def test_a_prompt_that_does_not_extend_what_came_before_starts_a_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = IN_LATER_TURNS_CUT + ASK
    texts = [other.decode(example.token_ids) for example in ChatTemplate(other, "model")(Chat(**CHATS[1]), 0)]
    assert texts == [
        "[system]b<|im_end|>[user]a b c a b c<|im_end|>[assistant]c c b<|im_end|>",
        "[system]b<|im_end|>[user]a b c a b c<|im_end|>[assistant]c<|im_end|>[user]a<|im_end|>[assistant]b a<|im_end|>",
    ]


def test_checkpoint_0_has_learnt_the_examples_and_proves_it(root: Path, first: Checkpoint) -> None:
    once = SFT.run(inputs_of(root), root, "checkpoints/once")
    assert (first.iteration, first.step, first.updated) == (0, 0, True)
    assert first.metrics["loss"] < once.metrics["loss"]
    assert (first.metrics["updates"], first.metrics["trained_tokens"]) == (4, 2 * once.metrics["trained_tokens"])
    assert SFT.run(inputs_of(root, epochs=2), root, "checkpoints/again").digest == first.digest
    probe = Probe.model_validate_json((root / first.path / PROBE).read_text())
    for sequence in probe.sequences:
        assert sequence.previous is None
        assert max(abs(a - b) for a, b in zip(sequence.logprobs, sequence.base, strict=True)) > 0.1
    assert (root / first.path / REFERENCE / WEIGHTS).read_bytes() == (root / first.path / WEIGHTS).read_bytes()
    assert not list((root / first.path).glob("*.pt*")), "the optimizer of the iterations starts afresh"


def test_a_kill_costs_what_was_not_kept_and_changes_no_bit(
    root: Path, first: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steps.grpo.halfway.EVERY", 0.0)
    step, kept = ImitationTrainer.training_step, root / "checkpoints"

    def killed(self: ImitationTrainer, *args: Any) -> torch.Tensor:
        if len(self.seen) == 3:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ImitationTrainer, "training_step", killed)
        with pytest.raises(KeyboardInterrupt):
            SFT.run(inputs_of(root, epochs=2), root, "checkpoints/killed")
    assert [path.name for path in kept.glob(".killed.*.sft/*")] == ["3"]
    resumed = SFT.run(inputs_of(root, epochs=2), root, "checkpoints/killed")
    assert (resumed.digest, resumed.metrics) == (first.digest, first.metrics)
    assert "goes on after 3 of 4 steps" in capsys.readouterr().out
    assert not list(kept.glob(".killed.*"))


def test_too_long_examples_are_left_out_and_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = SFT.run(inputs_of(root, max_tokens=60), root, "checkpoints/short")
    assert done.metrics["dropped_too_long"] == 1
    assert "imitates 2 sequences; left out: 1 too_long" in capsys.readouterr().out
    with pytest.raises(InvalidInputs, match=r"sft\.max_tokens = 5: of 3 examples none is short enough"):
        SFT.run(inputs_of(root, max_tokens=5), root, "checkpoints/none")
    with pytest.raises(InvalidInputs, match=r"of optimizer step \d is not finite, no checkpoint"):
        SFT.run(inputs_of(root, learning_rate=1e38, epochs=2), root, "checkpoints/none")


def update(root: Path, checkpoint: Checkpoint, path: str) -> Checkpoint:
    return TRAIN.run(update_inputs(root, checkpoint), root, path)


def update_inputs(root: Path, checkpoint: Checkpoint) -> TrainInputs:
    batch = write_batch(root, checkpoint.iteration, ragged_rows(checkpoint.iteration))
    return train_inputs(checkpoint, batch, beta=0.1)


def test_the_kl_is_to_what_the_examples_taught(root: Path, first: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    second = update(root, first, layout.checkpoint(1))
    assert second.step == 1
    assert abs(second.metrics["kl"]) < 1e-6, "nothing has been learnt since"
    third = update(root, second, layout.checkpoint(2))
    assert third.metrics["kl"] > 1e-4
    reference = (root / first.path / REFERENCE / WEIGHTS).read_bytes()
    assert (root / third.path / REFERENCE / WEIGHTS).read_bytes() == reference
    stored = torch.load(root / third.path / "optimizer.pt", weights_only=True)["state"]
    assert len(stored) == len(load_file(root / third.path / WEIGHTS)), "the optimizer knows one adapter"
    assert stored[0]["step"] == 2

    alone = first.model_copy(update={"path": "checkpoints/alone"})
    shutil.copytree(root / first.path, root / alone.path, ignore=shutil.ignore_patterns(REFERENCE))
    assert update(root, alone, "checkpoints/from-alone").metrics["kl"] > 1e-2, "the base model is farther"

    monkeypatch.setenv(RUNS, str(root.parent))
    for name, with_optimizer in (("kept", True), ("anew", False)):
        asked = ForkInputs(run="first", iteration=2, with_optimizer=with_optimizer, source=str(root), folder=root)
        fork, origin = make_run(asked, name), origin_of(root.parent / name)
        given = InitializeInputs(base_model=layout.BASE, base_digest=first.base_digest, lora=LORA, origin=origin)
        start = INITIALIZE.run(given, fork, layout.checkpoint(0))
        assert (fork / start.path / REFERENCE / WEIGHTS).read_bytes() == reference
        assert origin and origin.sft == {"demonstrations": 3}


def test_updates_with_a_reference_in_as_many_trainers_equal_updates_in_one(root: Path, first: Checkpoint) -> None:
    checkpoint = first
    for i in (1, 2):
        checkpoint = update(root, checkpoint, f"checkpoints/step-{i}")
    minibatches = []
    for iteration in (0, 1):
        inputs = update_inputs(root, first.model_copy(update={"iteration": iteration}))
        rows = read_rows(root / inputs.batch.path)
        trainer = make_update_trainer(inputs, Workspace(root, "x", root / "out"), rows)
        minibatches += trainer.minibatches
    trainer.minibatches, trainer.args.max_steps = minibatches, len(minibatches)
    load_weights(trainer.model, root / first.path)
    add_reference(trainer.model, root / first.path)
    trainer.train()
    for name, value in load_file(root / checkpoint.path / WEIGHTS).items():
        live = trainer.model.get_parameter(name.replace(".weight", ".default.weight"))
        assert torch.equal(live, value), name
    for name, value in load_file(root / first.path / WEIGHTS).items():
        assert torch.equal(trainer.model.get_parameter(name.replace(".weight", f".{REFERENCE}.weight")), value), name
