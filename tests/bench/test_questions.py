"""Where prompts come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forerun.bench.questions import read_questions


def test_the_built_in_set_has_the_categories_of_spec_bench() -> None:
    questions = read_questions()
    assert len({question.id for question in questions}) == len(questions) == 26
    counts = Counter(question.category for question in questions)
    assert len(counts) == 13
    assert set(counts.values()) == {2}
    assert any(len(question.turns) > 1 for question in questions)
    assert max(len(turn) for question in questions for turn in question.turns) < 1000


def test_questions(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"question_id": 1, "category": "a", "turns": ["x"]}\n\n{"question_id": 2, "category": "a", "turns": ["y"]}\n'
        '{"question_id": 3, "category": "b", "turns": ["z", "w"]}\n'
    )
    assert [question.id for question in read_questions(file)] == ["1", "2", "3"]
    assert [question.id for question in read_questions(file, per_category=1)] == ["1", "3"]
    assert [question.id for question in read_questions(file, limit=2)] == ["1", "2"]
    assert read_questions(file)[2].turns == ("z", "w")
    assert read_questions(file, turns=1)[2].turns == ("z",)


def test_a_plain_text_has_a_prompt_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Why is the sky blue?\n\n  Count to ten. \n")
    assert [question.turns for question in read_questions(file)] == [("Why is the sky blue?",), ("Count to ten.",)]
    file.write_text('{"turns": ["x"]}\n')
    assert read_questions(file)[0].turns == ("x",)


def test_signs_that_only_python_takes_for_the_end_of_a_line(tmp_path: Path) -> None:
    """And a mark at the beginning, as some editors write it."""
    file = tmp_path / "q.jsonl"
    file.write_text('\ufeff{"turns": ["one\u2028two\x85three"]}\r\n{"turns": ["four"], "category": null}\r\n', "utf-8")
    found = read_questions(file)
    assert [question.turns for question in found] == [("one\u2028two\x85three",), ("four",)]
    assert {question.category for question in found} == {"all"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"turns": ["a"], "category": "overall"}', "line 1 of .* stands for all of them together: rename it"),
        (b"", "no prompts"),
        (b"{", "line 1 of .* is not JSON"),
        (b"[1]", "has no turns"),
        (b'{"turns": []}', "has no turns"),
        (b'{"turns": ["a"]}\n{"turns": "a"}', "line 2"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 200_000, "line 1 of .* nested too deeply"),
        (b'{"turns": ["a"]}\n{"question_id": ' + b"1" * 5000 + b', "turns": ["a"]}', "line 2 of .* too many digits"),
        (b'{"turns": ["half \\ud800"]}', "line 1 of .* half a character"),
        (b'{"turns": ["a"], "category": "\\udfff"}', "line 1 of .* half a character"),
    ],
)
def test_bad_questions(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_questions(file)
    with pytest.raises(ValueError, match="at least 1"):
        read_questions(file, limit=0)
