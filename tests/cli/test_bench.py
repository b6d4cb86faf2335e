"""`forerun bench` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from tests.tiny_folder import save_tiny_model

QUESTIONS = """{"question_id": 1, "category": "math", "turns": ["one plus one"]}
{"question_id": 2, "category": "chat", "turns": ["hello", "and you?"]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("bench") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    file.write_text(QUESTIONS)
    return str(file)


def test_a_table_and_a_file(run: Terminal, model: str, prompts: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--max-tokens", "12", "--repeat", "2", "--batch", "1,2", "--dtype", "float32", "--json", str(result)]
    drafters = ["--drafters", "none,ngram,transformers", "--drafter-option", "ngram.tokens=3"]
    ended = run("bench", "--model", model, "--prompts", prompts, *drafters, *options)
    assert ended.code == 0, ended.err
    assert "batch 1" in ended.out
    assert "ngram" in ended.out
    content = json.loads(result.read_text())
    rows = {(row["drafter"], row["batch"], row["category"]): row for row in content["rows"]}
    assert set(rows) == {
        (drafter, batch, category)
        for drafter, batches in (("none", (1, 2)), ("ngram", (1, 2)), ("transformers", (1,)))
        for batch in batches
        for category in ("overall", "math", "chat")
    }
    for row in rows.values():
        assert row["tokens"] > 0
        assert row["tokens_per_second"] > 0
        assert row["tokens_per_pass"] >= 1
        assert row["temperature"] == 0
        assert row["identical_to_plain"] is True
    assert content["provenance"]["arguments"]["questions"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafters", "none,nope"], "no drafter 'nope'"),
        (["--drafter-option", "ngram.x=1"], "no option 'x'"),
        (["--drafter-option", "tokens=1"], "DRAFTER.KEY=VALUE"),
        (["--drafter-option", "suffix.tokens=1"], "not among"),
        (["--batch", "0"], "at least 1"),
        (["--per-category", "0"], "at least 1"),
        (["--json", "/no/such/folder/x.json"], "make the folder"),
    ],
)
def test_mistakes_are_told_in_one_sentence(run: Terminal, prompts: str, arguments: list[str], words: str) -> None:
    ended = run("bench", "--model", "/no/such/model", "--prompts", prompts, *arguments)
    assert ended.code == 1
    assert words in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err
