"""The probe of a checkpoint: log-probabilities that tell a server with the right weights from one with others."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from steps.common.models import PROBE, Probe, ProbeSequence
from steps.common.settings import Dtype
from steps.grpo.batch import Example, Row

TOKENS = 256
"""Most tokens of a probe after training."""
START_SEQUENCES, START_TOKENS = 4, 16


def random_sequences(vocabulary: int, seed: int) -> list[list[int]]:
    """Something to say about a checkpoint that has seen no data yet."""
    random = Random(seed)
    return [[random.randrange(vocabulary) for _ in range(START_TOKENS)] for _ in range(START_SEQUENCES)]


def telling_sequences(rows: Iterable[Row]) -> list[list[int]]:
    """Sequences with the largest |advantage|, where an update moves most; `TOKENS` in all, the last one cut."""
    telling: list[Row] = sorted(rows, key=lambda row: -abs(row.advantage))
    return _cut(telling)


def imitated_sequences(examples: Iterable[Example]) -> list[list[int]]:
    """Those that have the most to imitate in their first `TOKENS`; as many in all, the last one cut."""
    return _cut(sorted(examples, key=lambda example: -sum(example.mask[:TOKENS])))


def _cut(examples: Iterable[Example]) -> list[list[int]]:
    chosen: list[list[int]] = []
    left = TOKENS
    for example in examples:
        # A sequence of one token has no log-probability.
        if left < 2:
            break
        chosen.append(example.token_ids[:left])
        left -= len(chosen[-1])
    return chosen


def logprobs(model: PreTrainedModel | PeftModel, sequences: Iterable[Sequence[int]]) -> list[list[float]]:
    """Of each token but the first, given those before it: nats at temperature 1, from float32 logits."""
    model.eval()
    answers = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=model.device)
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        answers.append(scores.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return answers


def write_probe(
    folder: Path,
    dtype: Dtype,
    sequences: Sequence[list[int]],
    current: Sequence[list[float]],
    previous: Sequence[list[float]] | None,
    base: Sequence[list[float]],
) -> None:
    """Writes `probe.json`. All arguments run over the same sequences."""
    probe = Probe(
        dtype=dtype,
        sequences=[
            ProbeSequence(token_ids=ids, logprobs=current[i], previous=previous[i] if previous else None, base=base[i])
            for i, ids in enumerate(sequences)
        ],
    )
    (folder / PROBE).write_text(probe.model_dump_json())


def repeat_probe(folder: Path) -> None:
    """Says in a copied checkpoint's probe that its weights are those of the one before."""
    probe = Probe.model_validate_json((folder / PROBE).read_text())
    same = [sequence.model_copy(update={"previous": sequence.logprobs}) for sequence in probe.sequences]
    (folder / PROBE).write_text(probe.model_copy(update={"sequences": same}).model_dump_json())
