"""`forerun bench` on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.contestants import Forerun
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


def test_a_table_a_file_and_a_page(run: Terminal, model: str, prompts: str, tmp_path: Path) -> None:
    result, page = tmp_path / "result.json", tmp_path / "report.html"
    options = ["--max-tokens", "12", "--repeat", "2", "--batch", "1,2", "--dtype", "float32"]
    options += ["--json", str(result), "--report", str(page)]
    drafters = ["--drafters", "none,ngram,transformers", "--drafter-option", "ngram.tokens=3"]
    ended = run("bench", "--model", model, "--prompts", prompts, *drafters, *options)
    assert ended.code == 0, ended.err
    assert "batch 1" in ended.out
    assert "ngram" in ended.out
    content = json.loads(result.read_text())
    rows = {(row["drafter"], row["batch"], row["category"]): row for row in content["rows"]}
    assert set(rows) == {
        (drafter, batch, category)
        for drafter in ("none", "ngram", "transformers")
        for batch in (1, 2)
        for category in ("overall", "math", "chat")
    }
    for (drafter, batch, category), row in rows.items():
        assert row["tokens"] > 0
        assert row["request_tokens_per_second"] > 0
        assert (row["tokens_per_second"] is None) == (batch == 2 and category != "overall")
        assert (row["tokens_per_pass"] is None) == (drafter == "transformers" and batch == 2)
        assert row["temperature"] == 0
        assert row["identical_to_plain"] is True
    assert content["complete"] is True
    assert content["provenance"]["arguments"]["questions"] == 2
    assert model not in result.read_text()  # where things lie is no part of a result
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_run_that_was_interrupted_goes_on(
    run: Terminal, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "result.json"
    command = ["bench", "--model", model, "--prompts", prompts, "--max-tokens", "8", "--repeat", "2"]
    command += ["--dtype", "float32", "--json", str(result)]
    answer = Forerun.answer
    asked: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 12:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(Forerun, "answer", interrupted)
    ended = run(*command)
    assert ended.code == 130
    assert "--resume goes on" in ended.err.replace("\n", " ")
    before = json.loads(result.read_text())
    assert before["complete"] is False
    assert 0 < len(before["cells"]) < 8
    ended = run(*command)
    assert ended.code == 1
    assert "add --resume" in ended.err.replace("\n", " ")
    ended = run(*command, "--seed", "4", "--resume")
    assert ended.code == 1
    assert "seed None, not 4" in ended.err.replace("\n", " ")
    harmed = json.loads(result.read_text())
    harmed["cells"][0]["work"]["seconds"] = 0
    (tmp_path / "harmed.json").write_text(json.dumps(harmed))
    ended = run(*command, "--json", str(tmp_path / "harmed.json"), "--resume")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "harmed.json is damaged: measure again, into another file" in ended.err
    ended = run(*command, "--resume")
    assert ended.code == 0, ended.err
    after = json.loads(result.read_text())
    assert after["complete"] is True
    first = [cell for cell in before["cells"] if cell["round"] == 0]
    assert 0 < len(first) < len(before["cells"]), "it was interrupted in the second round"
    assert after["cells"][: len(first)] == first
    assert len(after["cells"]) == 8
    assert {row["rounds"] for row in after["rows"]} == {2}


def test_a_run_is_not_gone_on_with_after_a_training(run: Terminal, model: str, prompts: str, tmp_path: Path) -> None:
    """Other weights lie in the same folder: its name says nothing about them."""
    draft, result = save_tiny_model(tmp_path / "draft", seed=2), tmp_path / "result.json"
    command = ["bench", "--model", model, "--prompts", prompts, "--max-tokens", "4", "--repeat", "1"]
    command += ["--drafters", "draft_model", "--drafter-option", f"draft_model.model={draft}"]
    command += ["--dtype", "float32", "--json", str(result)]
    assert run(*command).code == 0
    assert json.loads(result.read_text())["provenance"]["weights"].keys() == {"the model", "draft_model"}
    assert str(tmp_path) not in result.read_text()
    assert run(*command, "--resume").code == 0
    save_tiny_model(draft, seed=3)
    ended = run(*command, "--resume")
    assert ended.code == 1
    assert "was measured with other weights of draft_model than are there now" in ended.err


def test_a_grid_with_arrivals_and_a_method_that_fails(
    run: Terminal, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # also where it is installed
    result = tmp_path / "result.json"
    grid = ["--drafters", "ngram,recycling", "--rules", "strongest,gumbel", "--trees", "own;2", "--arrivals", "100"]
    more = ["--temperatures", "0,1", "--peers", "vllm", "--seed", "1", "--json", str(result), "--repeat", "1"]
    ended = run(
        "bench", "--model", model, "--prompts", prompts, "--max-tokens", "6", "--dtype", "float32", *grid, *more
    )
    assert ended.code == 1
    assert "Failed, with the reason in the row: vllm" in ended.err
    assert "pip install vllm" in ended.out
    rows = json.loads(result.read_text())["rows"]
    methods = {row["method"] for row in rows}
    assert {"none", "vllm", "ngram", "ngram 2", "ngram gumbel", "ngram 2 gumbel", "recycling"} <= methods
    assert {(row["temperature"], row["arrivals"]) for row in rows} == {(0, None), (1, None), (0, 100), (1, 100)}
    assert all((row["error"] is not None) == (row["method"] == "vllm") for row in rows)
    assert all(row["identical_to_plain"] for row in rows if row["error"] is None)  # sampled with a seed too


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafters", "none,nope"], "no drafter 'nope'"),
        (["--drafter-option", "ngram.x=1"], "no option 'x'"),
        (["--drafter-option", "tokens=1"], "DRAFTER.KEY=VALUE"),
        (["--drafter-option", "suffix.tokens=1"], "not among"),
        (["--batch", "0"], "at least 1"),
        (["--batch", "1,1000000000"], "at most 4096"),
        (["--json", "same.x", "--report", "same.x"], "is named twice"),
        (["--per-category", "0"], "at least 1"),
        (["--json", "/no/such/folder/x.json"], "make the folder"),
        (["--report", "/no/such/folder/x.html"], "make the folder"),
        (["--rules", "nope"], "no verification rule 'nope'"),
        (["--trees", "own;5,x"], "tree"),
        (["--temperatures", "0,-1"], "0 (greedy) or more"),
        (["--temperatures", "warm"], "give numbers"),
        (["--arrivals", "0"], "above 0"),
        (["--peers", "nope"], "no peer 'nope'"),
        (["--resume"], "name it with --json"),
        (["--warm-up", "-1"], "at least 0"),
        (["--repeat", "0"], "at least 1"),
    ],
)
def test_mistakes_are_told_in_one_sentence(run: Terminal, prompts: str, arguments: list[str], words: str) -> None:
    ended = run("bench", "--model", "/no/such/model", "--prompts", prompts, *arguments)
    assert ended.code == 1
    assert words in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err


def test_results_do_not_take_the_place_of_the_prompts(run: Terminal, prompts: str) -> None:
    ended = run("bench", "--model", "/no/such/model", "--prompts", prompts, "--json", prompts)
    assert ended.code == 1
    assert "is named twice" in ended.err
    assert Path(prompts).read_text() == QUESTIONS


def test_results_do_not_take_the_place_of_other_files(run: Terminal, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    for content, words in (('{"mine": 1}', "is not a result of forerun bench: name another file, or remove it"),
                           ("", "there is no model"),
                           ('{"rows": [], "provenance": {}}', "there is no model")):  # fmt: skip
        file.write_text(content)
        ended = run("bench", "--model", "/no/such/model", "--prompts", prompts, "--json", str(file))
        assert (ended.code, words in ended.err) == (1, True)
        assert file.read_text() == content


def test_names_with_brackets_are_no_markup(run: Terminal, model: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [{"category": category, "turns": ["héllo 你好 \u2028 🙂"]} for category in ("[/b] <b>", "[red]")]
    file.write_text("\n".join(map(json.dumps, lines)))
    page = tmp_path / "[page].html"
    options = ["--max-tokens", "4", "--repeat", "1", "--drafters", "ngram", "--dtype", "float32", "--report", str(page)]
    ended = run("bench", "--model", model, "--prompts", str(file), *options)
    assert ended.code == 0, ended.err
    assert "[/b] <b>" in ended.out
    assert "[red]" in ended.out
    assert "&lt;b&gt;" in page.read_text()
