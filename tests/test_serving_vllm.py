"""Serving with a real vLLM: loads and probes, sabotage, refusals, deaths."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_serving_supervisor import gone_within, members
from vllm_fixtures import checkpoint, probe_tokens, start, started, tiny_inputs

from steps.common.errors import CorruptArtifact, InvalidInputs, ServerFault, WrongWeights
from steps.common.models import PROBE
from steps.serving.adapters import CONFIG, WEIGHTS, PolicyEndpoint, load_adapter, unload_adapter
from steps.serving.endpoint import Client, Endpoint, Refused

pytestmark = [pytest.mark.serve, pytest.mark.slow]


@pytest.fixture
def load(tiny_run: Path, vllm_server: Endpoint) -> Callable[[Path, int], PolicyEndpoint]:
    """Loads the checkpoint in a folder of the run as that of an iteration."""
    return lambda folder, iteration: load_adapter(vllm_server, tiny_run, checkpoint(folder, tiny_run, iteration))


@pytest.fixture
def forged(tiny_run: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    """A checkpoint with the weights of one and the probe of another."""

    def forge(weights: str, probe: str) -> Path:
        folder = tiny_run / "forged" / tmp_path.name
        shutil.copytree(tiny_run / "checkpoints" / weights, folder)
        shutil.copy(tiny_run / "checkpoints" / probe / PROBE, folder)
        return folder

    return forge


def test_each_checkpoint_answers_as_itself(load: Callable[[Path, int], PolicyEndpoint], tiny_run: Path) -> None:
    policies = [load(tiny_run / f"checkpoints/{i:04d}", i) for i in range(3)]
    assert [policy.verdict.answers_as for policy in policies] == ["checkpoint"] * 3
    assert all(policy.verdict.rms < 1e-5 for policy in policies)
    assert len({policy.model for policy in policies}) == 3
    # The first adapter changes nothing, so nothing tells it from the base.
    assert policies[0].verdict.shares == {"base": None}
    # The last update is a hundredth of the first; it is seen all the same.
    assert policies[2].verdict.shares == {"previous": pytest.approx(1, abs=0.01), "base": pytest.approx(1, abs=0.01)}
    assert policies[2].verdict.moved == {"previous": pytest.approx(0.017, abs=0.001)}
    assert load(tiny_run / "checkpoints/0001", 1).model == policies[1].model


@pytest.mark.parametrize(
    ("weights", "probe", "says"),
    [
        ("0000", "0001", "answers as (the base model|the checkpoint before it), not as"),
        ("0001", "0002", "answers as the checkpoint before it, not as"),
        ("0000", "0002", "answers as the base model, not as"),
        ("0002", "0001", "answers as something else, not as"),
    ],
)
def test_other_weights_under_the_name_are_found_out(
    load: Callable[[Path, int], PolicyEndpoint],
    forged: Callable[[str, str], Path],
    weights: str,
    probe: str,
    says: str,
) -> None:
    with pytest.raises(WrongWeights, match=says):
        load(forged(weights, probe), 7)


def test_another_folder_under_the_name_is_found_out(tiny_run: Path, vllm_server: Endpoint, tmp_path: Path) -> None:
    wanted = checkpoint(tiny_run / "checkpoints/0002", tiny_run, 8)
    with Client(vllm_server) as client:
        client.load_adapter(f"{tiny_run.name}-0008-{wanted.digest[:8]}", tiny_run / "checkpoints/0001")
    with pytest.raises(WrongWeights, match="checkpoints/0001, not from"):
        load_adapter(vllm_server, tiny_run, wanted)


def nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    next(iter(weights.values()))[0, 0] = math.nan
    save_file(weights, folder / WEIGHTS)


def half(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def wide(folder: Path) -> None:
    """Fits the rank and not the model."""
    weights = load_file(folder / WEIGHTS)
    save_file({k: np.tile(v, (1, 2)) if "lora_A" in k else v for k, v in weights.items()}, folder / WEIGHTS)


def narrow(folder: Path) -> None:
    """Does not fit the model either, but vLLM pads it and says nothing."""
    weights = load_file(folder / WEIGHTS)
    save_file({k: v[:, :10].copy() if "lora_A" in k else v for k, v in weights.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (nan, CorruptArtifact, "not finite"),
        (half, CorruptArtifact, "damaged"),
        (lambda folder: (folder / CONFIG).unlink(), CorruptArtifact, "missing"),
        (lambda folder: (folder / WEIGHTS).unlink(), CorruptArtifact, "missing"),
        (lambda folder: (folder / PROBE).unlink(), CorruptArtifact, "missing"),
        (wide, InvalidInputs, "vLLM can't serve this adapter"),
        (narrow, WrongWeights, "answers as something else"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_old_one_goes_on(
    load: Callable[[Path, int], PolicyEndpoint],
    forged: Callable[[str, str], Path],
    tiny_run: Path,
    damage: Callable[[Path], None],
    error: type[Exception],
    says: str,
) -> None:
    load(tiny_run / "checkpoints/0001", 1)
    folder = forged("0002", "0002")
    damage(folder)
    with pytest.raises(error, match=says):
        load(folder, 9)
    assert load(tiny_run / "checkpoints/0001", 1).verdict.answers_as == "checkpoint"


def test_unloading_does_not_disturb_requests_under_way(
    load: Callable[[Path, int], PolicyEndpoint], tiny_run: Path, vllm_server: Endpoint
) -> None:
    def long_answer(client: Client, model: str) -> str:
        tokens = probe_tokens(tiny_run / "checkpoints/0001")
        answer = client.complete(model=model, prompt=tokens, max_tokens=300, temperature=0, ignore_eos=True)
        text: str = answer["choices"][0]["text"]
        return text

    old = load(tiny_run / "checkpoints/0001", 11)
    with Client(vllm_server) as client, ThreadPoolExecutor() as threads:
        alone = long_answer(client, old.model)
        under_way = threads.submit(long_answer, client, old.model)
        time.sleep(0.2)
        new = load(tiny_run / "checkpoints/0002", 12)
        unload_adapter(vllm_server, old.model)
        assert long_answer(client, new.model) != alone
        assert under_way.result() == alone
        assert {old.model, new.model} & set(client.models()) == {new.model}
        with pytest.raises(Refused, match=r"404.*does not exist"):
            client.complete(model=old.model, prompt=[1], max_tokens=1)
    unload_adapter(vllm_server, old.model)  # once more: nothing to do


def test_logprobs_are_those_the_sampler_used(vllm_server: Endpoint, tiny_run: Path) -> None:
    tokens = probe_tokens(tiny_run / "checkpoints/0001")

    def top(temperature: float) -> dict[str, float]:
        with Client(vllm_server) as client:
            answer = client.complete(
                model=vllm_server.model,
                prompt=tokens,
                max_tokens=1,
                logprobs=20,
                temperature=temperature,
                return_tokens_as_token_ids=True,
            )
        scores: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return scores

    at_one, at_seven = top(1.0), top(0.7)
    # log softmax(x / T) = (x / T) - constant, and x = log softmax(x) + constant.
    shifts = [at_seven[token] - at_one[token] / 0.7 for token in at_one.keys() & at_seven.keys()]
    assert len(shifts) >= 15
    assert max(shifts) - min(shifts) < 1e-4
    assert abs(shifts[0]) > 1e-2


def test_the_key_is_asked_for_and_not_logged(vllm_server: Endpoint, tiny_run: Path) -> None:
    assert httpx.get(f"{vllm_server.base_url}/models", trust_env=False).status_code == 401
    for log in tiny_run.glob("serve/*/vllm.log"):
        assert vllm_server.api_key not in log.read_text()
    assert vllm_server.api_key.encode() not in Path(f"/proc/{vllm_server.pid}/cmdline").read_bytes()


def test_a_killed_server_ends_its_supervisor_and_a_killed_supervisor_its_server(tiny_run: Path) -> None:
    with started(tiny_run) as first:
        os.kill(engine_of(first.endpoint.pid), signal.SIGKILL)
        # vLLM itself exits with 0 then.
        assert first.supervisor.wait(15) == 1
        assert not first.endpoint_file.exists()
        assert "vLLM ended by itself" in (first.log.parent / "stderr").read_text()
    with started(tiny_run) as second:
        group = second.endpoint.pid
        with Client(second.endpoint) as client, ThreadPoolExecutor() as threads:
            lost = threads.submit(client.complete, model=second.endpoint.model, prompt=[1], max_tokens=1000)
            time.sleep(0.3)
            second.supervisor.kill()
            assert gone_within(group, 5)
            with pytest.raises(ServerFault):
                lost.result()


def engine_of(group: int) -> int:
    """The process that holds the model."""
    (engine,) = [pid for pid in members(group) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine


def test_the_end_of_the_flow_ends_a_server_that_still_starts(tiny_run: Path) -> None:
    server = start(tiny_run, tiny_inputs())
    children = Path(f"/proc/{server.supervisor.pid}/task/{server.supervisor.pid}/children")
    while not (started_ones := children.read_text().split()):
        assert server.supervisor.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    assert server.supervisor.stdin
    server.supervisor.stdin.close()
    assert server.supervisor.wait(15) == 0
    assert gone_within(int(started_ones[0]), 1)
    assert not server.endpoint_file.exists()
