"""Runs of deployments, seen from outside: how they are, why they ended, how to end them."""

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling

from steps.common.errors import InvalidInputs, StepFailed

INVALID = "InvalidInputs"
"""Name of the state of a step whose inputs are wrong: trying again won't help."""
LEAVING = 30.0
"""Seconds that cancelled runs may take to end; then nobody is there who could end them."""
SILENCE = 120.0
"""Seconds without an answer of Prefect's API."""


def failure(state: State[Any], path: str, log: Path) -> InvalidInputs | StepFailed:
    """The error that a run's last state stands for."""
    if state.name == INVALID:
        return InvalidInputs(state.message or INVALID)
    if state.is_failed() and state.message:
        return StepFailed(state.message)
    return StepFailed(f"{path}: its run was {(state.name or state.type).lower()}: {state.message} (log {log})")


def look_at(id: UUID) -> FlowRun:
    """A run as it is now. Raises `StepFailed` where Prefect does not answer for too long."""
    end = time.monotonic() + SILENCE
    while True:
        try:
            with get_client(sync_client=True) as client:
                return client.read_flow_run(id)
        except httpx.TransportError as error:  # a server that is restarted
            if time.monotonic() > end:
                raise StepFailed(f"Prefect's API did not answer for {SILENCE:.0f} s: {error}") from None
            time.sleep(1.0)


def cancel(*ids: UUID) -> None:
    """Ends runs, on their machines too where workers are there to do it; returns when they have ended."""
    with get_client(sync_client=True) as client:
        left = [id for id in ids if not is_final(client, id)]
        for id in left:
            client.set_flow_run_state(id, Cancelling())
        end = time.monotonic() + LEAVING
        while left := [id for id in left if not is_final(client, id)]:
            if time.monotonic() > end:
                for id in left:
                    client.set_flow_run_state(id, Cancelled(message="no worker ended it"), force=True)
            time.sleep(0.5)


def is_final(client: SyncPrefectClient, id: UUID) -> bool:
    """Has a run ended, or was it deleted?"""
    try:
        state = client.read_flow_run(id).state
    except ObjectNotFound:
        return True
    return state is not None and state.is_final()


def unfinished(tag: str) -> list[FlowRun]:
    """Runs with a tag that have not ended."""
    states = {"type": {"not_any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}
    wanted = FlowRunFilter.model_validate({"tags": {"all_": [tag]}, "state": states})
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=wanted)
