"""The step `initialize`: the first checkpoint follows from the seed; what it can not start from is explained."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from grpo_fixtures import LORA, make_base, start_run

from steps.common.artifacts import Checkpoint
from steps.common.errors import InvalidInputs
from steps.initialize import INITIALIZE, InitializeInputs

pytestmark = pytest.mark.train


def initialize(root: Path, base_model: str, **lora: Any) -> Checkpoint:
    inputs = InitializeInputs(base_model=base_model, lora=LORA.model_copy(update=lora))
    return INITIALIZE.run(inputs, root, "checkpoints/0000")


def test_a_missing_base_model_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputs, match="there is no base model '/no/such/folder'"):
        initialize(tmp_path, "/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputs, match=r"empty holds no model"):
        initialize(tmp_path, "empty")
    with pytest.raises(InvalidInputs, match="there is no base model 'a/b/c'"):
        initialize(tmp_path, "a/b/c")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it retries for half a minute
    with pytest.raises(InvalidInputs, match="the hub can't be reached: set base_model to a folder"):
        initialize(tmp_path, "some/model")
    assert not (tmp_path / "checkpoints/0000").exists()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated and for an unknown model."""

    def do_HEAD(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_a_gated_model_asks_for_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        template = "" if name == "ENDPOINT" else "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", endpoint + template)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InvalidInputs, match="some/gated is gated and HF_TOKEN is not set"):
        initialize(tmp_path, "some/gated")
    with pytest.raises(InvalidInputs, match="the hub has no model some/typo"):
        initialize(tmp_path, "some/typo")
    server.shutdown()
    server.server_close()


def test_an_adapter_that_does_not_fit_is_explained(tmp_path: Path) -> None:
    make_base(tmp_path / "model")
    with pytest.raises(InvalidInputs, match="target_modules does not fit the base model"):
        initialize(tmp_path, "model", target_modules=["no_such_module"])
    with pytest.raises(InvalidInputs, match="lm_head"):
        initialize(tmp_path, "model", target_modules=["lm_head"])


def test_the_first_adapter_is_the_seeds(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    digests = [start_run(root, seed=seed).digest for root, seed in zip(runs, (0, 0, 1), strict=True)]
    assert digests[0] == digests[1] != digests[2]
