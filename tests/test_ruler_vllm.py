"""A real vLLM judges: what the scripted judge imitates.

The tiny model knows nothing but bytes, so its scores are chance. What is real is the way there: the schema holds even
such a model to the form, and the base model is found beside an adapter.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from judge_fixtures import shelf
from run_fixtures import store_rollouts
from vllm_fixtures import checkpoint, started, tiny_inputs

from steps.common import layout, tables
from steps.common.settings import EnvironmentSettings
from steps.group import GROUP, GroupInputs, GroupSettings
from steps.judge.settings import JudgeSettings

BREVITY = {'"': 12, "}": 6, **dict.fromkeys("ĠĊĉč", -100)}
"""JSON takes any amount of text and white space, and so does a model of chance. Letters as the tokenizer has them."""
pytestmark = [pytest.mark.serve, pytest.mark.slow]


def test_a_schema_holds_any_model_to_the_form(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steps.serving.adapters import load_adapter

    rollouts = store_rollouts(tmp_path, [shelf("a", 0.2, 0.8, 0.2)])
    vocabulary = json.loads((tiny_run / "model/tokenizer.json").read_text())["model"]["vocab"]
    bias = {str(vocabulary[letter]): bias for letter, bias in BREVITY.items()}
    brief = {"temperature": 1.0, "seed": 0, "max_tokens": 400, "logit_bias": bias}

    def judged(number: int, **settings: Any) -> Any:
        environment = EnvironmentSettings(name="tic_tac_toe")
        rule = GroupSettings(judge=JudgeSettings.model_validate({"rubric": "Neat.", "parameters": brief} | settings))
        inputs = GroupInputs(iteration=0, rollouts=[rollouts], environment=environment, settings=rule)
        return GROUP.run(inputs, tmp_path, layout.groups(number))

    asked = tiny_inputs()
    asked = asked.model_copy(update={"settings": asked.settings.model_copy(update={"max_model_len": 4096})})
    with started(tiny_run, asked) as server:
        played = load_adapter(server.endpoint, tiny_run, checkpoint(tiny_run / "checkpoints/0001", tiny_run, 1))
        monkeypatch.setenv("NIGHTSCHOOL_POLICY_URL", played.base_url)
        monkeypatch.setenv("NIGHTSCHOOL_POLICY_KEY", played.api_key)
        monkeypatch.setenv("NIGHTSCHOOL_POLICY_MODEL", played.model)
        base = server.endpoint.model
        done = judged(0)
        babble = judged(1, response_format="none", max_reasks=1, parameters={"max_tokens": 20})
    assert judged(2) == done.model_copy(update={"path": layout.groups(2)}), "with no server any more"

    assert (done.judge.answers, babble.judge.answers) == (1, 2)
    assert done.judge.prompt_tokens > 500 and 0 < babble.judge.completion_tokens <= 40
    assert babble.dropped == {"judge_failed": 1}
    answers = [json.loads(file.read_text()) for file in (tmp_path / layout.JUDGE).iterdir()]
    assert {answer["model"] for answer in answers} == {base}
    rewards = tables.read([tmp_path / layout.groups(0) / tables.GROUPS], tables.GROUP_COLUMNS)["reward"].to_list()
    assert rewards[0] == rewards[2]
    assert all(0 <= reward <= 1 for reward in rewards)
