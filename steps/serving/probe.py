"""Does the server really serve this checkpoint? Its answers are compared with what the trainer computed.

The trainer leaves, for some tokens, their log-probabilities under the checkpoint, under the checkpoint before it and
under the base model. One number, how far the server is from the checkpoint, tells large differences. It can't tell a
small update from none when rounding is coarser than the update; but rounding is independent from token to token and an
update is one direction, so the projection on that direction tells them apart, with an error that the answers themselves
show.
"""

from collections.abc import Sequence
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

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest rms difference in nats. Seen: 3e-6 in float32; 0.05 in bfloat16, where single tokens differ by 0.3."""
CERTAINTY = 4.0
"""Standard errors between what was found and the midpoint of two checkpoints, to call them told apart."""


@dataclass(frozen=True)
class Verdict:
    """How a server answered."""

    rms: float
    """Of its difference from the checkpoint, in nats."""
    shares: dict[str, float | None]
    """How far it went from the alternative (0) to the checkpoint (1); None where those two can't be told apart."""
    answers_as: str
    """`checkpoint`, `previous`, `base` or `something else`."""


def judge(expected: Numbers, alternatives: dict[str, Numbers], served: Numbers, tolerance: float) -> Verdict:
    """Whose log-probabilities `served` are. All arrays are `(tokens,)`."""
    rms = _rms(served - expected)
    shares = {name: _share(expected, other, served) for name, other in alternatives.items()}
    # False for NaN too.
    if rms <= tolerance and all(share is None or share > 0.5 for share in shares.values()):
        return Verdict(rms, shares, "checkpoint")
    distances = {name: _rms(served - other) for name, other in alternatives.items()}
    nearest = min(distances, key=lambda name: distances[name])
    found = nearest if distances[nearest] <= tolerance and distances[nearest] <= rms else "something else"
    return Verdict(rms, shares, found)


def _share(expected: Numbers, other: Numbers, served: Numbers) -> float | None:
    """The projection of `served - other` on `expected - other`, or None where its standard error is too large."""
    direction = expected - other
    length = float(direction @ direction)
    if length == 0:
        return None
    moved = served - other
    share = float(moved @ direction) / length
    # What lies off the line is noise, whichever of the two is served.
    noise = _rms(moved - share * direction)
    error = noise / length**0.5
    return share if CERTAINTY * error < 0.5 else None


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


def check_served(client: Client, name: str, folder: Path, dtype: Dtype) -> Verdict:
    """Asks the server called `name` what the checkpoint in `folder` must answer.

    Raises `WrongWeights`, `CorruptArtifact` (no usable probe) and `ServerFault`.
    """
    probe = read_probe(folder)
    rows = probe.sequences
    alternatives = {"base": _flat([row.base for row in rows])}
    previous = [row.previous for row in rows if row.previous is not None]
    if len(previous) == len(rows):
        alternatives = {"previous": _flat(previous), **alternatives}
    served = ask(client, name, [row.token_ids for row in rows])
    tolerance = max(TOLERANCE[dtype], TOLERANCE[probe.dtype])
    verdict = judge(_flat([row.logprobs for row in rows]), alternatives, served, tolerance)
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
