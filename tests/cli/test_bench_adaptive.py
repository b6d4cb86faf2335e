"""`forerun bench --adaptive`: whole trees beside an engine that chooses how much is drafted."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model


def test_both_stand_side_by_side(run: Terminal, tmp_path: Path) -> None:
    model, result, page = str(save_tiny_model(tmp_path / "model")), tmp_path / "result.json", tmp_path / "page.html"
    (tmp_path / "prompts.txt").write_text("the the the\none plus one\n")
    options = ["--dtype", "float32", "--max-tokens", "16", "--repeat", "1", "--batch", "2", "--adaptive", "both"]
    files = ["--prompts", str(tmp_path / "prompts.txt"), "--json", str(result), "--report", str(page)]
    ended = run("bench", "--model", model, "--drafters", "ngram", *options, *files)
    assert ended.code == 0, ended.err
    assert "ngram adaptive" in ended.out
    assert "ngram adaptive" in page.read_text()
    content = json.loads(result.read_text())
    rows = {row["method"]: row for row in content["rows"] if row["category"] == "overall"}
    assert list(rows) == ["none", "ngram", "ngram adaptive"]
    assert all(row["identical_to_plain"] for row in rows.values())
    # At once two texts are drafted for only when it has paid, so the engine begins plainly.
    assert rows["ngram adaptive"]["rows_verified"] <= rows["ngram"]["rows_verified"]
    assert [cell["case"]["adaptive"] for cell in content["cells"]] == [False, False, True]
    assert content["provenance"]["arguments"]["adaptive"] == "both"


def test_another_word_is_refused(run: Terminal) -> None:
    ended = run("bench", "--adaptive", "maybe")
    assert ended.code == 1
    assert "give off, on, or both" in ended.err
