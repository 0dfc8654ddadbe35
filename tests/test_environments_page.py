"""docs/environments.md follows from the code, and the code says there what a reader needs."""

import importlib
import inspect
import re
import runpy
import shutil
from pathlib import Path

import pytest

from environments import available, load

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/environments.md"


def test_the_page_is_what_the_code_says(tmp_path: Path) -> None:
    page = Path(shutil.copy(PAGE, tmp_path))
    runpy.run_path(str(ROOT / "tools/environments-page"))["main"](page)
    assert page.read_text() == PAGE.read_text(), "run `make docs`"


@pytest.mark.parametrize("name", available())
def test_an_environment_says_what_is_asked_what_is_rewarded_and_how_many_turns(name: str) -> None:
    text = inspect.getdoc(importlib.import_module(f"environments.{name}")) or ""
    assert all(re.search(word, text) for word in (r"\bAsked\b", r"\b[Rr]ewarded\b", r"\bTurns: "))


@pytest.mark.parametrize("name", available())
def test_an_environment_says_which_extra_it_needs(name: str) -> None:
    module = importlib.import_module(f"environments.{name}")
    needed = set(re.findall(r"nightschool\[(\w+)\]", inspect.getsource(module)))
    assert needed == set(re.findall(r"\bthe extra `(\w+)`", inspect.getdoc(module) or ""))


@pytest.mark.parametrize("name", available())
def test_each_option_is_described(name: str) -> None:
    fields = type(load(name)).model_fields
    assert not [field for field, info in fields.items() if not info.description]
