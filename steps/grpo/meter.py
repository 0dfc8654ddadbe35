"""What an update tells about itself, as exact means over all sampled tokens of all micro-batches and ranks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator

from steps.grpo.batch import Tensors

SUMS = ("tokens", "entropy", "approx_kl", "kl", "clipped", "ratio", "difference")
PEAKS = ("ratio", "difference")


class Step(NamedTuple):
    """One minibatch as it was just before its optimizer step."""

    finite: bool
    approx_kl: float


@dataclass
class Minibatch:
    """Sums over sampled tokens, by the names in `SUMS`, and the largest values, by those in `PEAKS`."""

    loss: float
    sums: dict[str, float]
    peaks: dict[str, float]

    def mean(self, name: str) -> float:
        return self.sums[name] / max(self.sums["tokens"], 1.0)


class Meter:
    """Watches micro-batches; `close` ends a minibatch, on every rank alike."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.minibatches: list[Minibatch] = []
        self.grad_norms: list[float] = []
        """Before clipping, one a step taken."""
        self._sums, self._peaks = self._zeros(len(SUMS)), self._zeros(len(PEAKS))

    @property
    def steps(self) -> int:
        """Minibatches closed."""
        return len(self.minibatches)

    def observe(self, inputs: Tensors, logps: torch.Tensor, entropies: torch.Tensor, clipped: float) -> None:
        """Adds a micro-batch. `logps`, `entropies`: (rows, completion tokens); `clipped`: a fraction of its tokens."""
        mask = inputs["tool_mask"].bool()
        logps = logps.detach()[mask].double()
        change = logps - inputs["sampling_per_token_logps"][mask].double()
        ratio, tokens = change.exp(), mask.sum().double()
        reference = inputs["ref_per_token_logps"][mask].double() if "ref_per_token_logps" in inputs else logps
        values = {
            "tokens": tokens,
            "entropy": entropies.detach()[mask].double().sum(),
            "approx_kl": (ratio - 1 - change).sum(),
            "kl": ((reference - logps).exp() - 1 - (reference - logps)).sum(),
            "clipped": clipped * tokens,
            "ratio": ratio.sum(),
            "difference": change.abs().sum(),
        }
        self._sums += torch.stack([values[name] for name in SUMS]).to(self._sums)
        if tokens:
            self._peaks = torch.maximum(self._peaks, torch.stack([ratio.max(), change.abs().max()]).to(self._peaks))

    def close(self, loss: torch.Tensor) -> Step:
        """Ends the minibatch whose loss, on this rank, is `loss`."""
        mine = torch.cat([loss.detach().reshape(1).to(self._sums), self._sums, self._peaks])[None]
        ranks = self.accelerator.gather(mine)
        self.minibatches.append(
            Minibatch(
                loss=float(ranks[:, 0].mean()),
                sums=dict(zip(SUMS, ranks[:, 1 : 1 + len(SUMS)].sum(0).tolist(), strict=True)),
                peaks=dict(zip(PEAKS, ranks[:, 1 + len(SUMS) :].amax(0).tolist(), strict=True)),
            )
        )
        self._sums, self._peaks = self._zeros(len(SUMS)), self._zeros(len(PEAKS))
        return Step(bool(ranks[:, 0].isfinite().all()), self.minibatches[-1].mean("approx_kl"))

    def discard(self) -> None:
        """Forgets the last minibatch, whose step was not taken."""
        self.minibatches.pop()

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.accelerator.device)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of all steps taken; `logprob_difference_*` over the first's, as nothing had changed."""
        total = Minibatch(0.0, {name: sum(m.sums[name] for m in self.minibatches) for name in SUMS}, {})
        first = self.minibatches[0]
        return {
            "loss": sum(m.loss for m in self.minibatches) / self.steps,
            "entropy": total.mean("entropy"),
            "kl": total.mean("kl"),
            "approx_kl": total.mean("approx_kl"),
            "clip_fraction": total.mean("clipped"),
            "grad_norm": sum(self.grad_norms) / self.steps,
            "importance_ratio_mean": total.mean("ratio"),
            "importance_ratio_max": max(m.peaks["ratio"] for m in self.minibatches),
            "logprob_difference_mean": first.mean("difference"),
            "logprob_difference_max": first.peaks["difference"],
            "updates": float(self.steps),
            "trained_tokens": total.sums["tokens"],
        }
