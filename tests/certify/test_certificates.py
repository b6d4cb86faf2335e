"""`python -m benchmarks.certificates`: which certificates are kept, and the table of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.certificates import MODEL, SETTINGS, is_current, read, table

from forerun.certify.certificate import Certificate
from forerun.certify.findings import Finding
from forerun.core.params import SamplingParams
from tests.certify.tiny_subject import KNOWN, certified
from tests.engine.tiny import RandomTrees

ORIGIN = {"time": "2026-11-18T01:02:03+00:00", "arguments": dict(SETTINGS), "git": {"commit": "c", "dirty": False}}


def written(folder: Path, found: Certificate, **more: Any) -> None:
    content = {"model": MODEL, "drafter": "trees", **found.as_dict(), "provenance": ORIGIN, **more}
    (folder / "trees.json").write_text(json.dumps(content))


def test_a_line_for_each_certificate(tmp_path: Path) -> None:
    settings = SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.95)
    written(tmp_path, certified(RandomTrees(4, KNOWN), *settings, samples=30))
    *_, line, _, note = table(tmp_path).splitlines()
    assert note == "<sub>commit c, 2026-11-18: trees</sub>"
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    drafter, verdict, greedy, seeded, p_value, visible, at_one, control, _ = cells
    assert (drafter, verdict, greedy, seeded) == ("trees", "certified", "3/3", "3/3")
    assert 0.01 < float(p_value) <= 1
    assert 0 < float(visible.rstrip("%")) < 100
    assert 0 < float(at_one.rstrip("%")) <= 100
    assert 0 <= float(control.removeprefix("< ")) <= 1


def test_what_was_made_with_other_sources_or_options_is_made_again(tmp_path: Path) -> None:
    assert not is_current(read("trees", tmp_path), "c")
    (tmp_path / "trees.json").write_text("{")  # cut off
    assert not is_current(read("trees", tmp_path), "c")
    written(tmp_path, Certificate([], None))
    assert is_current(read("trees", tmp_path), "c")
    assert not is_current(read("trees", tmp_path), "d")
    written(tmp_path, Certificate([], None), model="another")
    assert not is_current(read("trees", tmp_path), "c")
    written(tmp_path, Certificate([], None), provenance=ORIGIN | {"arguments": SETTINGS | {"samples": 20}})
    assert not is_current(read("trees", tmp_path), "c")


def test_a_test_that_did_not_see_the_broken_rule_is_named() -> None:
    def finding(test: str, seen: bool, heat: float = 1.0) -> Finding:
        return Finding(heat, test, "texts", "as it should be", True, "broken", seen, {})

    both = Certificate([finding("next tokens", False), finding("all places", True)], None)
    assert both.verdict == "certified"
    assert both.reason.endswith("at every temperature, though not by next tokens at 1")
    assert Certificate([finding("all places", True)], None).reason.endswith("at every temperature")
    assert Certificate([finding("all places", True), finding("all places", False, 0.7)], None).verdict == "refused"


def test_without_certificates_the_table_says_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.certificates"):
        table(tmp_path)
