"""Does the server really serve this checkpoint? Its answers are compared with what the trainer computed.

The trainer leaves, for some tokens, their log-probabilities under the checkpoint, under the checkpoint before it and
under the base model (the alternatives). Three questions, each of which sees what the others can't:

1. Is the server near the checkpoint? Sees gross errors; small updates drown in the rounding of bfloat16.
2. On the line from an alternative to the checkpoint, is it nearer the checkpoint? Rounding is independent from token to
   token and an update is one direction, so much of the rounding averages out, and what is left shows in the answers.
3. Asked for the alternative itself, does the server say something else? Weights that were not applied give the very
   same answers, rounding included, so this sees the smallest update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from steps.common.errors import CorruptArtifact, WrongWeights
from steps.common.models import PROBE, Probe
from steps.common.settings import Dtype
from steps.serving.endpoint import Client

Numbers = NDArray[np.float64]

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest rms difference in nats. Seen: 3e-6 in float32; in bfloat16 0.06 to 0.15, most on unlikely tokens."""
CERTAINTY = 4.0
"""Standard errors between the answers and the midpoint of two checkpoints, to say which of the two it was."""
SEEN = 1e-4
"""Smallest rms difference between two checkpoints, in nats, that a server must show."""


@dataclass(frozen=True)
class Verdict:
    """How a server answered."""

    rms: float
    """Of its difference from the checkpoint, in nats."""
    shares: dict[str, float | None]
    """How far it went from the alternative (0) to the checkpoint (1); None where it can't be told which it was."""
    moved: dict[str, float]
    """Rms of its difference from its own answers for the alternative, in nats."""
    answers_as: str
    """`checkpoint`, `previous`, `base` or `something else`."""


def judge(
    expected: Numbers,
    alternatives: Mapping[str, Numbers],
    served: Numbers,
    served_alternatives: Mapping[str, Numbers],
    tolerance: float,
) -> Verdict:
    """Whose log-probabilities `served` are. All arrays are `(tokens,)`.

    `served_alternatives` are the server's own answers for those alternatives that it serves as well.
    """
    rms = _rms(served - expected)
    shares = {name: _share(expected, other, served) for name, other in alternatives.items()}
    moved = {name: _rms(served - own) for name, own in served_alternatives.items()}
    for name, distance in moved.items():
        update = _rms(expected - alternatives[name])
        if update > SEEN and distance < update / 4:
            return Verdict(rms, shares, moved, name)
    # False for NaN too.
    if rms <= tolerance and all(share is None or share > 0.5 for share in shares.values()):
        return Verdict(rms, shares, moved, "checkpoint")
    distances = {name: _rms(served - other) for name, other in alternatives.items()}
    nearest = min(distances, key=lambda name: distances[name])
    found = nearest if distances[nearest] <= min(tolerance, rms) else "something else"
    return Verdict(rms, shares, moved, found)


def _share(expected: Numbers, other: Numbers, served: Numbers) -> float | None:
    """The projection of `served - other` on `expected - other`, or None where it is too near 0.5 to mean anything.

    The trainer's own numbers are rounded too. Where that is all the difference between `expected` and `other`, the
    projection is 0.5 whichever is served, so 0.5 is where nothing is known.
    """
    direction = expected - other
    length = float(direction @ direction)
    if length == 0:
        return None
    moved = served - other
    share = float(moved @ direction) / length
    # What lies off the line is rounding. It is larger where the update is larger, at unlikely tokens, so the error is
    # the one of MacKinnon and White (1985) for noise of unequal size, HC3.
    rounding = (moved - share * direction) / (1 - direction**2 / length + 1e-9)
    error = float(np.sqrt(np.sum((direction * rounding) ** 2))) / length
    return share if abs(share - 0.5) > CERTAINTY * error else None


def _rms(difference: Numbers) -> float:
    return float(np.sqrt(np.mean(difference**2)))


def read_probe(folder: Path) -> Probe:
    """The checkpoint's probe. Raises `CorruptArtifact`."""
    file = folder / PROBE
    try:
        probe = Probe.model_validate_json(file.read_text())
    except FileNotFoundError:
        raise CorruptArtifact(
            f"{file} is missing: nothing would tell whether a server serves this checkpoint"
        ) from None
    except ValidationError as error:
        raise CorruptArtifact(f"{file} is no probe: {error.errors()[0]['msg']}") from None
    if not any(len(sequence.token_ids) > 1 for sequence in probe.sequences):
        raise CorruptArtifact(f"{file} asks nothing: it holds no sequence of two tokens")
    return probe


def ask(client: Client, name: str, sequences: Sequence[list[int]]) -> Numbers:
    """Log-probabilities that the server gives to each token but the first, all sequences in one row.

    Raises `ServerFault`, also where the server refuses.
    """
    # vLLM computes a prompt's log-probabilities at temperature 1, and takes none from its prefix cache.
    answer = client.complete(model=name, prompt=list(sequences), max_tokens=1, prompt_logprobs=0)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return np.array(
        [
            scores[str(token)]["logprob"]
            for choice, sequence in zip(choices, sequences, strict=True)
            for scores, token in zip(choice["prompt_logprobs"][1:], sequence[1:], strict=True)
        ],
        dtype=np.float64,
    )


def check_served(client: Client, name: str, folder: Path, dtype: Dtype, others: Mapping[str, str]) -> Verdict:
    """Asks the server called `name` what the checkpoint in `folder` must answer.

    `others` are the served names of `base` or `previous`, of those that can be asked. Raises `WrongWeights`,
    `CorruptArtifact` (no usable probe) and `ServerFault`.
    """
    probe = read_probe(folder)
    rows = probe.sequences
    sequences = [row.token_ids for row in rows]
    alternatives = {"base": _flat([row.base for row in rows])}
    previous = [row.previous for row in rows if row.previous is not None]
    if len(previous) == len(rows):
        alternatives = {"previous": _flat(previous), **alternatives}
    tolerance = max(TOLERANCE[dtype], TOLERANCE[probe.dtype])
    verdict = judge(
        _flat([row.logprobs for row in rows]),
        alternatives,
        ask(client, name, sequences),
        {kind: ask(client, other, sequences) for kind, other in others.items() if kind in alternatives},
        tolerance,
    )
    if verdict.answers_as != "checkpoint":
        raise WrongWeights(_complaint(folder, verdict, tolerance))
    return verdict


def _flat(rows: Sequence[list[float]]) -> Numbers:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def _complaint(folder: Path, verdict: Verdict, tolerance: float) -> str:
    names = {"previous": "the checkpoint before it", "base": "the base model", "something else": "something else"}
    return (
        f"the server answers as {names[verdict.answers_as]}, not as {folder.parent.name}/{folder.name} "
        f"(rms difference {verdict.rms:.2g} nats, allowed {tolerance:g}; {_describe(verdict)}): nothing was played; "
        f"look into the server's log, then start again"
    )


def _describe(verdict: Verdict) -> str:
    return ", ".join(
        f"{'can not be told' if share is None else f'{share:.0%} of the way'} from {name}"
        for name, share in verdict.shares.items()
    )
