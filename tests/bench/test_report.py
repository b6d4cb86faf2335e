"""The page: whole, self-contained, and well-formed."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from forerun.bench import charts
from forerun.bench.cases import Setting
from forerun.bench.provenance import provenance
from forerun.bench.report import render
from forerun.bench.store import Store
from tests.bench.scripted import Scripted, contest_of, rows_of, run

VOID = {"meta", "line", "rect", "circle", "path", "polyline", "br"}


class Reader(HTMLParser):
    """Notes text and attributes, and that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def result(*settings: Setting, complete: bool = True, **more: Scripted) -> dict[str, Any]:
    methods = {"none": Scripted(20), "fast": Scripted(50, per_pass=2), "<b>&": Scripted(30), **more}
    contest, _ = contest_of(methods, *settings)
    store = Store(None, provenance({"model": "tiny", "drafters": list(methods)}), rows_of(contest), lambda *_: None)
    store.cells += run(contest)
    return store.as_dict(complete=complete)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_every_row_is_on_the_page() -> None:
    found = result(Setting(), Setting(4), Setting(4, 1.0, 3.0), broken=Scripted(fails_on="t"))
    page = render(found)
    told = read(page).texts
    assert page.count("<details>") == 3
    for section in page.split("<details>")[1:]:
        lines = re.findall(r"<tr><td>(.*?)</td><td[^>]*>(.*?)</td>", section.split("</details>")[0])
        assert len(lines) == 4 * 3
    assert "2.50×" in told
    assert "RuntimeError: the device is on fire" in told
    assert "<b>&" in told  # escaped in the page
    for heading in (
        "Speedup over batch size",
        "Speedup by method",
        "Speedup by category",
        "Memory against speedup",
        "Acceptance by depth",
        "Predicted against measured",
        "Where the time goes",
    ):
        assert heading in told


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = render(result())
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert not {name for name, _ in read(page).attributes} & {"src", "href"}
    assert "prefers-color-scheme: dark" in page


def test_an_interrupted_run_says_so() -> None:
    assert "interrupted" in render(result(complete=False))
    assert "interrupted" not in render(result())


def test_a_run_that_was_interrupted_before_anything_could_be_compared() -> None:
    """Plain decoding failed, and the other one has an answer in one of the categories."""
    contest, _ = contest_of({"none": Scripted(fails_on="o"), "fast": Scripted(50)})
    store = Store(None, provenance({"model": "tiny"}), rows_of(contest), lambda *_: None)
    store.cells += run(contest)[:3]
    found = store.as_dict(complete=False)
    assert {(row["method"], row["category"]) for row in found["rows"]} >= {("none", "chat"), ("fast", "math")}
    assert ("fast", "overall") not in {(row["method"], row["category"]) for row in found["rows"]}
    assert "no speedup" in read(render(found)).texts


def test_a_page_without_figures() -> None:
    found = result()
    read(render({**found, "rows": []}))
    failed = [
        row | dict.fromkeys(row.keys() - {"drafter", "method", "batch", "temperature", "category"})
        for row in found["rows"]
    ]
    read(render({**found, "rows": [row | {"error": "no"} for row in failed]}))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.9, 1.37), (0.0, 0.003), (0.0, 12345.0), (2.0, 2.0), (0, 7)])
def test_ticks_are_round_and_reach_around(low: float, high: float) -> None:
    found = charts.ticks(low, high)
    assert found[0] <= low + 1e-6
    assert found[-1] >= high - 1e-6
    assert 2 <= len(found) <= 8
    steps = {round(b - a, 9) for a, b in itertools.pairwise(found)}
    assert len(steps) == 1
