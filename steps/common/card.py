"""A model card: what an exported checkpoint is, in Markdown as the Hugging Face hub reads it.

All of it comes from the run's own manifests, so that its numbers are those of the run. Nothing in it depends on this
machine.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from steps.common import layout
from steps.common.artifacts import Checkpoint, Evaluation, Manifest, read_manifest
from steps.common.errors import CorruptArtifact
from steps.common.models import is_on_hub
from steps.common.origin import origin_of
from steps.common.runs import read_record

SHOWN = ("environment", "lora", "sft", "sampling", "rollout", "group", "collate", "train", "seed")
"""The tables of a run's settings that decide what was learnt; the others are the machine's matters."""


def card_of(root: Path, checkpoint: Checkpoint, merged: bool) -> str:
    """The card of a checkpoint of the run at `root`, as an adapter or merged. Raises `CorruptArtifact`."""
    manifest = read_manifest(root / checkpoint.path)
    if manifest is None:
        raise CorruptArtifact(f"{root / checkpoint.path} has no {layout.MANIFEST}: it was never finished")
    config = read_record(root).config
    parts = [
        _front_matter(checkpoint, merged),
        f"# {root.name}, checkpoint {checkpoint.iteration}",
        _what(root, checkpoint, config, merged),
        "## Held-out reward",
        _rewards(root, checkpoint.iteration),
        *(["## Last update", _table(("metric", "value"), _numbers(checkpoint.metrics))] if checkpoint.metrics else []),
        "## Settings",
        f"```json\n{json.dumps({key: config.get(key) for key in SHOWN}, indent=1)}\n```",
        "## Made with",
        _table(("package", "version"), manifest.versions.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(checkpoint: Checkpoint, merged: bool) -> str:
    """JSON is YAML. The hub takes no folder for a base model."""
    facts: dict[str, Any] = {"base_model": checkpoint.base_model} if is_on_hub(checkpoint.base_model) else {}
    facts |= {
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "lora", "nightschool"],
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items()), "---"])


def _what(root: Path, checkpoint: Checkpoint, config: dict[str, Any], merged: bool) -> str:
    names = {layout.MODEL: "a small model that the run made", layout.BASE: "a model in a folder"}
    base = names.get(checkpoint.base_model, checkpoint.base_model)
    if checkpoint.base_digest:
        base += f" (digest {checkpoint.base_digest})"
    kind = "A LoRA adapter, merged into its base model" if merged else "A LoRA adapter in PEFT's format"
    lines = [
        f"{kind}, trained with GRPO by Nightschool in the environment `{config['environment']['name']}`.",
        f"- Base model: {base}",
        f"- Iterations: {checkpoint.iteration}, optimizer steps: {checkpoint.step}",
    ]
    if origin := origin_of(root):
        lines.append(f"- Forked from {origin}")
    return "\n".join([lines[0], "", *lines[1:]])


def _rewards(root: Path, last: int) -> str:
    rows = [evaluation for i, evaluation in _evaluations(root) if i <= last]
    if not rows:
        return "No checkpoint up to this one was evaluated."
    table = _table(
        ("iteration", "mean reward", "standard error", "tasks", "failed"),
        ((str(e.iteration), f"{e.reward:.4f}", f"{e.stderr:.4f}", str(e.tasks), str(e.failed)) for e in rows),
    )
    parts = ["Means over the same held-out tasks for every checkpoint, without the rollouts that failed.", table]
    if rows[-1].iteration != last:
        parts.append("This checkpoint itself was not evaluated.")
    return "\n\n".join(parts)


def _evaluations(root: Path) -> Iterator[tuple[int, Evaluation]]:
    """Also of those whose files were pruned: the numbers are in the manifest."""
    for i in layout.numbered(root, "evaluations"):
        manifest: Manifest | None = read_manifest(root / layout.evaluation(i))
        if manifest:
            facts = {**manifest.artifact, "path": layout.evaluation(i), "digest": manifest.digest}
            yield i, Evaluation.model_validate(facts)


def _numbers(metrics: dict[str, float]) -> Iterator[tuple[str, str]]:
    return ((name, f"{value:.5g}") for name, value in sorted(metrics.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
