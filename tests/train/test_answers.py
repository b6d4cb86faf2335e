"""Prompts, and the target's answers to them: read, asked once, and the same after an interruption."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.train import answers
from forerun.train.answers import AnswerOptions, answer_prompts, read_answers
from forerun.train.prompts import Prompt, hold_back, read_prompts
from tests.train.conftest import PROMPTS

OPTIONS = AnswerOptions(max_tokens=8, longest=512)


def silent(doing: str, done: int, total: int) -> None: ...


# --- prompts ---------------------------------------------------------------------------------------------------


def test_prompts_in_both_forms(tmp_path: Path, prompts: Path) -> None:
    assert read_prompts(prompts) == PROMPTS
    path = tmp_path / "prompts"
    path.write_text('{"question_id": 7, "turns": ["a", "b"]}\n\n{"turns": ["c"]}\n', "utf-8")
    assert read_prompts(path) == [Prompt("7", ("a", "b")), Prompt("line 3", ("c",))]
    path.write_text("one\n\n two \n", "utf-8")
    assert read_prompts(path) == [Prompt("line 1", ("one",)), Prompt("line 3", ("two",))]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no prompts: give JSON lines"),
        (b"\n \n", "has no prompts: give JSON lines"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b'{"turns": ["a"]}\nb', "line 2 of .* is not JSON"),
        (b'{"turns": []}', "line 1 of .* has no turns"),
        (b'{"turns": [""]}', "line 1 of .* has no turns"),
        (b'{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}', "two prompts with the id '1'"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read_prompts(path)


def test_some_are_held_back() -> None:
    learned, held = hold_back(PROMPTS, 4, seed=1)
    assert (len(learned), len(held)) == (8, 4)
    assert sorted([*learned, *held], key=PROMPTS.index) == PROMPTS
    assert hold_back(PROMPTS, 4, seed=1) == (learned, held) != hold_back(PROMPTS, 4, seed=2)
    assert len(hold_back(PROMPTS, 100, seed=1)[1]) == 6
    with pytest.raises(ValueError, match="give at least two"):
        hold_back(PROMPTS[:1], 4, seed=1)


# --- answers ---------------------------------------------------------------------------------------------------


def test_answers_are_the_targets(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer_prompts(loaded, PROMPTS, path, AnswerOptions(max_tokens=8, sampled=0, longest=512), silent)
    texts = read_answers(path, PROMPTS)
    assert len(texts) == sum(len(prompt.turns) for prompt in PROMPTS)
    with LLM(loaded, cache_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        told = llm.generate("what is it?", params)
        talk = [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": told.text},
            {"role": "user", "content": "and then?"},
        ]
        first, second = texts[3], texts[4]
        assert (list(first.prompt), list(first.answer)) == (llm.tokens("what is it?"), told.token_ids)
        assert list(second.prompt) == llm.tokens(talk)
        assert list(second.answer) == llm.generate(talk, params).token_ids


def test_an_interruption_changes_nothing(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CPU_BATCH", 2)
    monkeypatch.setattr(answers, "ROUND", 2)
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    answer_prompts(loaded, PROMPTS, whole, OPTIONS, silent)

    def interrupt(doing: str, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_prompts(loaded, PROMPTS, torn, OPTIONS, interrupt)
    with torn.open("a", encoding="utf-8") as file:
        file.write('{"id": "p8", "turns": [{"prompt": [1')
    asked: list[str] = []
    ask = answers.converse

    def spy(llm: LLM, prompts: list[Prompt], options: AnswerOptions) -> list[dict[str, Any]]:
        asked.extend(prompt.id for prompt in prompts)
        return ask(llm, prompts, options)

    monkeypatch.setattr(answers, "converse", spy)
    answer_prompts(loaded, PROMPTS, torn, OPTIONS, silent)
    assert asked == ["p8", "p9", "p10", "p11"]
    assert torn.read_text() == whole.read_text()
    answer_prompts(loaded, PROMPTS, torn, OPTIONS, silent)
    assert len(asked) == 4


def test_greedy_and_sampled() -> None:
    def temperatures(options: AnswerOptions) -> list[float]:
        return [options.params(Prompt(str(number), ("a",)), 100).temperature for number in range(200)]

    assert set(temperatures(AnswerOptions(sampled=0))) == {0.0}
    assert set(temperatures(AnswerOptions(sampled=1))) == {1.0}
    assert 70 < sum(temperatures(AnswerOptions(sampled=0.5))) < 130
    sampled = AnswerOptions(sampled=1)
    seeds = {sampled.params(Prompt(str(number), ("a",)), 100).seed for number in range(200)}
    assert len(seeds) == 200
    assert sampled.params(PROMPTS[0], 3).max_tokens == 3


def test_what_leaves_no_room_is_not_asked(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    long = Prompt("long", ("x" * 600, "and?"))
    answer_prompts(loaded, [long, PROMPTS[0]], path, OPTIONS, silent)
    assert len(read_answers(path, [long, PROMPTS[0]])) == 1
    with pytest.raises(ValueError, match="no prompt leaves room for an answer"):
        read_answers(path, [long])


def test_damage_and_a_full_disk_are_told(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"id": "p0"}) + "\n", "utf-8")
    with pytest.raises(ValueError, match=r"line 1 of .* is damaged: delete it"):
        answer_prompts(loaded, PROMPTS, path, OPTIONS, silent)

    def full(*arguments: object) -> list[dict[str, Any]]:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.unlink()
    monkeypatch.setattr(answers, "converse", full)
    with pytest.raises(ValueError, match=r"the disk is full.*--resume"):
        answer_prompts(loaded, PROMPTS, path, OPTIONS, silent)
