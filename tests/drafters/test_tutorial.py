"""The tutorial's code runs, and its drafter is found by being a file of the folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun.drafters
from forerun.core.sequence import Sequence
from forerun.drafters.drafter import Budget
from forerun.drafters.find import make_drafter, names
from tests.drafters.contract import fresh, live
from tests.drafters.models import paths_of, setup

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"


def blocks(section: str) -> list[str]:
    """The Python code of a section of the page."""
    text = PAGE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of the tutorial, as if it lay in the folder."""
    (tmp_path / "bigram.py").write_text("\n\n".join(blocks("A drafter in one file")), "utf-8")
    monkeypatch.setattr(forerun.drafters, "__path__", [*forerun.drafters.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("forerun.drafters.bigram", None)
    vars(forerun.drafters).pop("bigram", None)


@pytest.mark.usefixtures("bigram")
def test_the_drafter_is_found_and_holds_to_the_contract() -> None:
    assert "bigram" in names()
    live(fresh("bigram"), steps=14, seed=0)
    assert live(fresh("bigram"), steps=8, seed=2) == live(fresh("bigram"), steps=8, seed=2)


@pytest.mark.usefixtures("bigram")
def test_it_drafts_what_it_has_seen() -> None:
    drafter = make_drafter("bigram", setup(), {"tokens": "4"})
    first = Sequence([1, 2, 3, 1], 100, id=1)
    assert paths_of(drafter.draft([first], [Budget(9, 9)]), 0)[-1] == (2, 3, 1, 2)
    first.commit([5])
    first.commit([1])
    second = Sequence([9, 1], 100, id=2)  # other texts teach as well
    tree = drafter.draft([first, second], [Budget(2, 9), Budget(9, 1)])
    assert [paths_of(tree, 0)[-1], paths_of(tree, 1)[-1]] == [(5, 1), (5,)]
    with pytest.raises(ValueError, match="bigram option tokens is 0: give"):
        make_drafter("bigram", setup(), {"tokens": 0})


def test_the_sampled_example_runs() -> None:
    (code,) = blocks("Saying how it was drawn")
    made: dict[str, object] = {}
    exec(compile(code, PAGE.name, "exec"), made)
    assert str(getattr(made["tree"], "drawing", None)) == "Drawing.IID"


def test_no_code_of_the_page_is_left_out() -> None:
    everything = PAGE.read_text("utf-8").count("```python\n")
    assert everything == len(blocks("A drafter in one file")) + len(blocks("Saying how it was drawn")) > 5
