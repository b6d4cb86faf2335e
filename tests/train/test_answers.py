"""Prompts, and the target's answers to them: read, asked once, and the same after an interruption."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.core.params import SamplingParams
from forerun.engine.llm import LLM
from forerun.engine.loaded import LoadedModel
from forerun.train import answers, writing
from forerun.train.answer_file import AnswerFile, Conversation
from forerun.train.answers import AnswerOptions, Talk, answer_prompts, read_answers, target_identity
from forerun.train.prompts import Prompt, emphasised, hold_back, read_emphasis, read_prompts
from forerun.train.texts import Text
from forerun.train.writing import Writer
from tests.train.conftest import PROMPTS

OPTIONS = AnswerOptions(max_tokens=8, longest=512)


def silent(doing: str, done: int, total: int) -> None: ...


# --- prompts ---------------------------------------------------------------------------------------------------


def test_prompts_in_both_forms(tmp_path: Path, prompts: Path) -> None:
    assert read_prompts(prompts) == PROMPTS
    path = tmp_path / "prompts"
    path.write_text('{"question_id": 7, "turns": ["a", "b"]}\n\n{"turns": ["c"]}\n', "utf-8")
    assert read_prompts(path) == [Prompt("7", ("a", "b")), Prompt("line 3", ("c",))]
    path.write_text('{"turns": ["a\u2028b\x85c"]}\r\n', "utf-8")
    assert read_prompts(path) == [Prompt("line 1", ("a\u2028b\x85c",))]
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


def as_lists(texts: list[Text]) -> list[tuple[list[int], list[int]]]:
    return [(text.prompt.tolist(), text.answer.tolist()) for text in texts]


def test_answers_are_the_targets(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    answer_prompts(loaded, PROMPTS, path, AnswerOptions(max_tokens=8, sampled=0, longest=512), silent)
    texts = as_lists(read_answers(path, PROMPTS, target_identity(loaded)))
    assert len(texts) == sum(len(prompt.turns) for prompt in PROMPTS)
    with LLM(loaded, cache_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        told = llm.generate("what is it?", params)
        talk = [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": told.text},
            {"role": "user", "content": "and then?"},
        ]
        assert texts[3] == (llm.tokens("what is it?"), told.token_ids)
        assert texts[4] == (llm.tokens(talk), llm.generate(talk, params).token_ids)


def test_an_interruption_changes_nothing(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CPU_BATCH", 2)
    monkeypatch.setattr(answers, "WRITTEN", 2)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    answer_prompts(loaded, PROMPTS, whole, OPTIONS, silent)

    def interrupt(doing: str, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_prompts(loaded, PROMPTS, torn, OPTIONS, interrupt)
    assert len(list(AnswerFile(torn).conversations())) == 8
    with torn.open("ab") as file:
        file.write(b"\x40\0\0\0\1\2\3\4torn")
    asked: list[int] = []
    ask = answers.converse

    def spy(writer: Writer, talks: list[Talk], options: AnswerOptions) -> Iterator[Talk]:
        asked.append(len(talks))
        return ask(writer, talks, options)

    monkeypatch.setattr(answers, "converse", spy)
    answer_prompts(loaded, PROMPTS, torn, OPTIONS, silent)
    assert asked == [4]
    assert as_lists(read_answers(torn, PROMPTS)) == as_lists(read_answers(whole, PROMPTS))
    answer_prompts(loaded, PROMPTS, torn, OPTIONS, silent)
    assert asked == [4]


def test_prompts_may_be_asked_again(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    options = AnswerOptions(max_tokens=8, sampled=0, longest=512)
    answer_prompts(loaded, PROMPTS[:2], path, options, silent)
    once = as_lists(read_answers(path, PROMPTS[:2]))
    answer_prompts(loaded, PROMPTS[:2], path, replace(options, times=3), silent)
    thrice = as_lists(read_answers(path, PROMPTS[:2]))
    assert thrice[::3] == once
    assert len(thrice) == 6
    with pytest.raises(ValueError, match="was begun with another --max-tokens, --seed: give the same"):
        answer_prompts(loaded, PROMPTS[:2], path, replace(options, seed=1, max_tokens=9), silent)
    with pytest.raises(ValueError, match="has the answers of another target"):
        read_answers(path, PROMPTS[:2], "another")
    changed = [Prompt("p0", ("something else?",))]
    with pytest.raises(ValueError, match="has no answers to these prompts"):
        read_answers(path, changed)


def test_greedy_and_sampled() -> None:
    def temperatures(options: AnswerOptions, time: int = 0) -> list[float]:
        return [options.params(Prompt(str(number), ("a",)), 100, time).temperature for number in range(200)]

    assert set(temperatures(AnswerOptions(sampled=0))) == {0.0}
    assert set(temperatures(AnswerOptions(sampled=0), time=1)) == {1.0}
    assert set(temperatures(AnswerOptions(sampled=1))) == {1.0}
    assert 70 < sum(temperatures(AnswerOptions(sampled=0.5))) < 130
    sampled = AnswerOptions(sampled=1)
    seeds = {sampled.params(Prompt(str(number), ("a",)), 100, time).seed for number in range(200) for time in range(2)}
    assert len(seeds) == 400
    assert sampled.params(PROMPTS[0], 3).max_tokens == 3


def test_what_leaves_no_room_is_not_asked(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    long = Prompt("long", ("x" * 600, "and?"))
    answer_prompts(loaded, [long, PROMPTS[0]], path, OPTIONS, silent)
    assert len(read_answers(path, [long, PROMPTS[0]])) == 1
    with pytest.raises(ValueError, match=r"has no answers .* shorter ones"):
        read_answers(path, [long])


# --- the file --------------------------------------------------------------------------------------------------


def test_tokens_are_kept_small(tmp_path: Path) -> None:
    words = np.random.default_rng(0).zipf(1.2, 200_000) % 49_000
    texts = [Text(words[start : start + 500], 100) for start in range(0, len(words), 500)]
    file = AnswerFile.create(tmp_path / "a", {})
    file.append([Conversation(str(number), [text]) for number, text in enumerate(texts)])
    assert file.path.stat().st_size < 2 * len(words)
    found = [each.turns[0] for each in AnswerFile(file.path).conversations()]
    assert as_lists(found) == as_lists(texts)
    wide = Text.of((1, 70_000), (2,))
    file.append([Conversation("wide", [wide, wide]), Conversation("none", [])])
    *_, last, none = file.conversations()
    assert (as_lists(last.turns), none.turns) == (as_lists([wide, wide]), [])


def test_damage_and_a_full_disk_are_told(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="is no file of answers"):
        answer_prompts(loaded, PROMPTS, path, OPTIONS, silent)
    path.unlink()
    answer_prompts(loaded, PROMPTS[:1], path, OPTIONS, silent)
    answer_prompts(loaded, PROMPTS[:2], path, OPTIONS, silent)
    content = bytearray(path.read_bytes())
    content[content.index(b"\xfd7zXZ") + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged at byte \d+: delete it"):
        answer_prompts(loaded, PROMPTS, path, OPTIONS, silent)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.unlink()
    monkeypatch.setattr(AnswerFile, "append", full)
    with pytest.raises(ValueError, match=r"the disk is full.*--resume"):
        answer_prompts(loaded, PROMPTS, path, OPTIONS, silent)


def test_some_categories_count_more(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["a"], "category": "rag"}, {"turns": ["b"], "category": "qa"}, {"turns": ["c"]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = read_prompts(path)
    assert [prompt.category for prompt in prompts] == ["rag", "qa", ""]
    taken = emphasised(prompts, read_emphasis("rag=3, qa=0"))
    assert [prompt.turns[0] for prompt in taken] == ["a", "a", "a", "c"]
    assert emphasised(prompts, read_emphasis("")) == prompts
    with pytest.raises(ValueError, match="names x, of which there are no prompts: they have the categories qa, rag"):
        emphasised(prompts, {"x": 2})
    for wrong in ("rag", "rag=", "rag=-1", "rag=1.5", "=3", "rag=101"):
        with pytest.raises(ValueError, match="--emphasis has"):
            read_emphasis(wrong)
