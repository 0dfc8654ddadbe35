"""An exported checkpoint, loaded by those it was exported for, answers as the checkpoint's probe says."""

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from grpo_fixtures import LORA, make_base, ragged_rows, train_inputs, write_batch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from steps.common import layout
from steps.common.artifacts import Checkpoint, verify
from steps.common.errors import InvalidInputs, NightschoolError
from steps.common.models import PROBE, Probe, digest_of_model, link_base
from steps.export import EXPORT, Export, ExportInputs
from steps.grpo.probe import logprobs
from steps.initialize import INITIALIZE, InitializeInputs
from steps.publish import publish
from steps.train import TRAIN

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    """A run on a base model in a folder, and its checkpoint 1."""
    root, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("models") / "small"
    make_base(folder)
    link_base(root, folder, "digest")
    asked = InitializeInputs(base_model=layout.BASE, base_digest=digest_of_model(folder), lora=LORA)
    first = INITIALIZE.run(asked, root, layout.checkpoint(0))
    inputs = train_inputs(first, write_batch(root, 0, ragged_rows()), old_logprobs="recompute", learning_rate=0.05)
    return root, TRAIN.run(inputs, root, layout.checkpoint(1))


def export(trained: tuple[Path, Checkpoint], folder: Path, *, merge: bool) -> Export:
    root, checkpoint = trained
    return EXPORT.run(ExportInputs(checkpoint=checkpoint, merge=merge, card="# The card\n"), root, str(folder))


def probe_of(trained: tuple[Path, Checkpoint]) -> Probe:
    root, checkpoint = trained
    return Probe.model_validate_json((root / checkpoint.path / PROBE).read_text())


def rms(model: Any, probe: Probe, of: str = "logprobs") -> float:
    """Of the difference between a model's log-probabilities and those in a probe."""
    rows = logprobs(model, [sequence.token_ids for sequence in probe.sequences])
    pairs = zip(rows, (getattr(sequence, of) for sequence in probe.sequences), strict=True)
    squares = [(a - b) ** 2 for row, expected in pairs for a, b in zip(row, expected, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def test_the_adapter_is_loaded_by_plain_peft(trained: tuple[Path, Checkpoint], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()  # empty: it may be there
    done = export(trained, folder, merge=False)
    assert (done.merged, done.difference) == (False, None)
    assert rms(AutoPeftModelForCausalLM.from_pretrained(folder), probe_of(trained)) < 1e-5
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (folder / "README.md").read_text() == "# The card\n"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= verify(folder).files.keys()


def test_the_merged_model_is_loaded_by_plain_transformers(trained: tuple[Path, Checkpoint], tmp_path: Path) -> None:
    folder, probe = tmp_path / "merged", probe_of(trained)
    done = export(trained, folder, merge=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert rms(model, probe) == pytest.approx(done.difference, abs=1e-6)
    assert done.difference is not None
    assert done.difference < 1e-5 < 1e-2 < rms(model, probe, "base")
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert not (folder / "adapter_config.json").exists()


def test_a_merge_with_another_model_is_not_exported(trained: tuple[Path, Checkpoint], tmp_path: Path) -> None:
    root, _ = trained
    right = (root / layout.BASE).resolve()
    other = AutoModelForCausalLM.from_pretrained(right)
    other.lm_head.weight.data *= 2
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(right).save_pretrained(tmp_path / "other")
    (root / layout.BASE).unlink()
    (root / layout.BASE).symlink_to(tmp_path / "other")
    with pytest.raises(
        InvalidInputs, match=r"merged into .*other, checkpoint 0001 answers otherwise than it was train"
    ):
        export(trained, tmp_path / "merged", merge=True)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    link_base(root, right, digest_of_model(right))


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that an upload of small files needs: the hub itself can't be reached from here."""

    asked: list[tuple[str, Any]]
    files: dict[str, bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/api/models/agents/night/commit/"):
            content: Any = [json.loads(line) for line in body.splitlines()]
        else:
            content = json.loads(body)
        self.asked.append((self.path, content))
        assert self.headers["Authorization"] == "Bearer hf_of_the_test"
        self._answer(self.status, self._reply(content) if self.status == 200 else {"error": "not with this token"})

    def _reply(self, content: Any) -> Any:
        kind = self.path.removeprefix("/api/").split("/")
        if kind[0] == "repos":
            return {"url": f"http://{self.headers['Host']}/agents/night"}
        if "preupload" in kind:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in content["files"]]
            return {"files": files}
        if "commit" in kind:
            for line in content[1:]:
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {
                "commitUrl": f"http://{self.headers['Host']}/agents/night/commit/1",
                "commitOid": "1",
                "success": True,
            }
        return {"warnings": [], "errors": []}  # of the card's front matter

    def _answer(self, status: int, reply: Any) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, status: int = 200) -> Iterator[type[Hub]]:
    """A server that stands where the hub does."""
    handler = type("Handler", (Hub,), {"asked": [], "files": {}, "status": status})
    server = HTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()


def test_an_export_is_uploaded_in_one_commit_to_a_private_repository(
    trained: tuple[Path, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(trained, tmp_path / "adapter", merge=False)
    with hub(monkeypatch) as asked:
        assert publish(tmp_path / "adapter", "agents/night", "Checkpoint 1 of night").endswith("/commit/1")
    assert asked.files == {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    (made,) = (content for path, content in asked.asked if path == "/api/repos/create")
    assert made["visibility"] == "private"
    (commit,) = (content for path, content in asked.asked if "/commit/" in path)
    assert commit[0]["value"]["summary"] == "Checkpoint 1 of night"


def test_an_upload_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# The card\n")
    with (
        hub(monkeypatch, status=403),
        pytest.raises(NightschoolError, match=r"the hub did not take agents/night \(.*403"),
    ):
        publish(tmp_path, "agents/night", "m")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NightschoolError, match=r"the hub did not take agents/night \(.*refused"):
        publish(tmp_path, "agents/night", "m")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(InvalidInputs, match="there is no HF_TOKEN"):
        publish(tmp_path, "agents/night", "m")
