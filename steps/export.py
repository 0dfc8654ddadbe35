"""Step `export`: writes a checkpoint as others expect it. Makes a folder for PEFT or transformers, and vLLM.

The artifact's path is any folder instead of one in the run's. Beside the model, its tokenizer and its card there is a
manifest, which says what each file's sha256 is.

    python -m steps.export --root runs/demo --path /models/agent --inputs inputs.json
"""

from typing import Any

from steps.common.artifacts import Artifact, Checkpoint
from steps.common.step import Inputs, Step, Workspace


class ExportInputs(Inputs):
    """What is exported."""

    checkpoint: Checkpoint
    merge: bool = False
    """Put the adapter's weights into the base model's, instead of writing the adapter alone."""
    card: str
    """The text of README.md."""


class Export(Artifact):
    """A model for others."""

    merged: bool
    difference: float | None
    """Rms of what the merged model's log-probabilities differ by from the checkpoint's probe, in nats. None for an
    adapter, whose weights are copied."""


def export(inputs: ExportInputs, workspace: Workspace) -> dict[str, Any]:
    """Writes a checkpoint as a PEFT adapter, or merged into its base model, with tokenizer and model card."""
    from steps.grpo.export import write_model

    return write_model(inputs, workspace)


EXPORT = Step("export", ExportInputs, Export, export)

if __name__ == "__main__":
    EXPORT.main()
