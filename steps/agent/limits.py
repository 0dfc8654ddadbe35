"""How long, how often and how much: none of it changes what a rollout is, only whether it comes to an end."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from steps.common.artifacts import Record


class RolloutLimits(Record):
    """Bounds of every wait and every retry while a shard is played, and of what agents may do. Seconds."""

    concurrency: PositiveInt = 128
    """Most rollouts played, and most requests sent to the server, at once."""
    connect_timeout: PositiveFloat = 10.0
    """To reach the server."""
    request_timeout: PositiveFloat = 300.0
    """For one answer of the server."""
    rollout_timeout: PositiveFloat = 1800.0
    """For one whole attempt, all of its model calls included."""
    teardown_timeout: PositiveFloat = 10.0
    """For an agent to clean up after it was cancelled; then it is abandoned."""
    block_timeout: PositiveFloat = 60.0
    """For which an agent may keep the process to itself, without an `await` that waits; then the process is killed."""
    calls: PositiveInt = 2000
    """Of the model, by one attempt."""
    output_bytes: PositiveInt = 1 << 20
    """That an attempt may print; a process that plays several, as much as all that it has begun. The log of the step
    gets as much of each process."""
    open_files: PositiveInt = 256
    """Files and sockets that an attempt may open and leave open; a process, as many as all that it has begun."""
    processes: PositiveInt = 16
    """That an attempt may have running, with all that they start in turn; a process, as many as all at work in it."""
    request_retries: NonNegativeInt = 5
    """After a server fault (unreachable, broken, busy, too late), with waits from 0.25 s doubling to 8 s."""
    agent_retries: NonNegativeInt = 1
    """Fresh tries after the agent failed (raised, took too long, gave no finite reward); then the failure is kept."""
    server_retries: NonNegativeInt = 1
    """Fresh tries after a request's retries were used up; then the shard gives up, to be continued later."""
