"""Errors that a user can act on, and the exit status that tells an orchestrator whether to try again.

A `NightschoolError` is one line: what was wrong, where, and what to do. Commands print it without a traceback.
Everything else is a bug or the machine's fault; it keeps its traceback and may be retried.

    NightschoolError
    ├── InvalidInputs        the inputs can't work: trying again won't help
    │   ├── CorruptArtifact  a finished folder is not what its manifest says
    │   ├── PrunedArtifact   a finished folder whose files were deleted to make room, and are needed
    │   └── TooManyFailures  more rollouts failed than the run allows
    ├── ServerFault          the model's server is gone or broken: try again once it is back
    ├── WrongWeights         the server is well but does not answer as the checkpoint does
    └── StepFailed           a step's process ended without its artifact
"""

DO_NOT_RETRY = 202
"""Exit status of a step whose inputs are wrong."""


class NightschoolError(Exception):
    """A failure that one line explains."""

    exit_status = 1


class InvalidInputs(NightschoolError):
    """The inputs can't work; the same command would fail again."""

    exit_status = DO_NOT_RETRY


class CorruptArtifact(InvalidInputs):
    """A finished artifact differs from its manifest, or its manifest can't be read."""


class PrunedArtifact(InvalidInputs):
    """The files of a finished artifact are needed, and were deleted by `nightschool prune`."""


class TooManyFailures(InvalidInputs):
    """More rollouts failed than `max_failed_fraction` allows."""


class ServerFault(NightschoolError):
    """The model's server did not answer as it should, after all retries."""


class WrongWeights(NightschoolError):
    """The server's answers are not the checkpoint's. Nothing may be played against it, so nothing retries by itself."""


class StepFailed(NightschoolError):
    """A step's process ended without an artifact."""
