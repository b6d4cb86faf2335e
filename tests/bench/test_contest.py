"""The benchmark's own arithmetic, with methods whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forerun.bench.contest import Answer, Contest, Messages, Method, Work
from forerun.bench.questions import Question, read_questions
from forerun.core.params import SamplingParams

QUESTIONS = [
    Question("1", "math", ("one",)),
    Question("2", "chat", ("two", "and then?")),
    Question("3", "math", ("three",)),
]


@dataclass
class Scripted:
    """Answers 10 tokens a turn, at a given speed; remembers what it was asked."""

    speed: float
    per_pass: float
    token: int
    asked: list[list[str]] = field(default_factory=list)
    closed: int = 0

    def answer(self, conversations: Sequence[Messages], params: SamplingParams) -> tuple[list[Answer], Work]:
        self.asked.append([" ".join(each["content"] for each in talk) for talk in conversations])
        count = 10 * len(conversations)
        seconds = count / self.speed
        return [Answer([self.token] * 10, "ok") for _ in conversations], Work(
            seconds, round(count / self.per_pass), 0.9 * seconds
        )

    def close(self) -> None:
        self.closed += 1


def test_figures_are_what_the_times_say() -> None:
    plain, fast, other = Scripted(20, 1, 7), Scripted(50, 2.5, 7), Scripted(10, 1, 8)
    methods = [Method("none", lambda batch: plain), Method("fast", lambda batch: fast)]
    methods.append(Method("other", lambda batch: other, batches=False))
    steps: list[str] = []
    contest = Contest(QUESTIONS, methods, SamplingParams(), batches=(1, 4), repeat=3)
    rows = contest.run(steps.append)
    assert len(steps) == contest.rounds() == 3 * 2 * (3 + 2)
    assert len(rows) == 3 * (3 + 2)
    found = {(row["drafter"], row["batch"], row["category"]): row for row in rows}
    assert ("other", 4, "overall") not in found
    overall = found["fast", 1, "overall"]
    assert overall["tokens"] == 40
    assert overall["tokens_per_second"] == pytest.approx(50)
    assert overall["tokens_per_pass"] == pytest.approx(2.5)
    assert overall["speedup"] == pytest.approx(2.5)
    assert overall["outside_share"] == pytest.approx(0.1)
    assert (overall["identical_to_plain"], overall["identical"], overall["answers"]) == (True, 4, 4)
    assert found["other", 1, "math"]["speedup"] == pytest.approx(0.5)
    assert found["other", 1, "math"]["identical_to_plain"] is False
    assert found["none", 4, "chat"]["speedup"] == pytest.approx(1)
    assert plain.closed == 6


def test_turns_are_answered_one_after_the_other() -> None:
    scripted = Scripted(1, 1, 1)
    Contest(QUESTIONS, [Method("none", lambda batch: scripted)], SamplingParams(), repeat=1).run()
    assert scripted.asked == [["one", "three"], ["two"], ["two ok and then?"]]


def test_without_plain_decoding_there_is_no_speedup() -> None:
    rows = Contest(QUESTIONS, [Method("x", lambda batch: Scripted(1, 1, 1))], SamplingParams(), repeat=1).run()
    assert all(row["speedup"] is None and row["identical_to_plain"] is None for row in rows)


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no questions"),
        (b"{", "line 1 of .* is not JSON"),
        (b"[1]", "has no turns"),
        (b'{"turns": []}', "has no turns"),
        (b'{"turns": ["a"]}\n{"turns": "a"}', "line 2"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_questions(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_questions(file)
    with pytest.raises(ValueError, match="at least 1"):
        read_questions(file, limit=0)
