"""The Python API with a tiny model from a folder: every way in and out gives the same text."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import LLM, Completion, DraftOptions, SamplingParams
from forerun.engine import llm as llm_module
from forerun.engine.loaded import find_device
from tests.tiny_folder import CONTEXT, END, save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.2, top_p=0.95, seed=5, max_tokens=40)
PROMPTS = ["hello", "what is it?", "the the", "a longer one, with words and commas, and words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        yield llm


def same(first: Completion, second: Completion) -> None:
    assert [(c.token_ids, c.text, c.finish_reason) for c in first.choices] == [
        (c.token_ids, c.text, c.finish_reason) for c in second.choices
    ]


def test_the_names_of_the_package() -> None:
    assert forerun.LLM is llm_module.LLM
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = forerun.LMM
    for name in forerun.__all__:
        assert getattr(forerun, name).__name__ == name
    program = "import forerun, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert light.stdout == "False False\n"


# --- what comes back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_completion_is_the_text_of_its_tokens(llm: LLM, params: SamplingParams) -> None:
    for prompt in PROMPTS:
        done = llm.generate(prompt, params)
        assert done.prompt_tokens == len(llm.tokens(prompt))
        assert 0 < len(done.token_ids) <= params.max_tokens
        assert done.stats.tokens == len(done.token_ids)
        assert done.finish_reason == ("stop" if done.token_ids[-1] in llm.model.target.eos else "length")
        assert done.text == llm.model.tokenizer.decode(done.token_ids)
        assert done.logprobs is None


@pytest.mark.parametrize("params", [GREEDY, replace(SEEDED, n=2, logprobs=1)])
def test_every_way_gives_the_same(llm: LLM, params: SamplingParams) -> None:
    alone = [llm.generate(prompt, params) for prompt in PROMPTS]
    together = llm.generate(PROMPTS, params)
    asynchronous = asyncio.run(llm.agenerate(PROMPTS, params))
    for one, batched, later in zip(alone, together, asynchronous, strict=True):
        same(one, batched)
        same(one, later)

    async def astream(prompt: str) -> list[str]:
        texts = [""] * params.n
        async for piece in llm.astream(prompt, params):
            texts[piece.index] += piece.text
        return texts

    for prompt, one in zip(PROMPTS, alone, strict=True):
        texts, tokens = [""] * params.n, [[] for _ in range(params.n)]  # type: list[str], list[list[int]]
        for piece in llm.stream(prompt, params):
            assert len(piece.kinds) == len(piece.tokens)
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
        assert texts == [choice.text for choice in one.choices] == asyncio.run(astream(prompt))
        assert tokens == [choice.token_ids for choice in one.choices]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_drafts_do_not_change_the_text(llm: LLM, folder: Path, drafter: str, params: SamplingParams) -> None:
    options = {"model": str(folder)} if drafter == "draft_model" else {"min_match": 1}
    with llm.with_drafter(drafter, drafter_options=options, tree="3") as drafted:
        assert drafted.model is llm.model
        plain, fast = llm.generate(PROMPTS, params), drafted.generate(PROMPTS, params)
    for one, other in zip(plain, fast, strict=True):
        same(one, other)
    assert sum(done.stats.accepted for done in fast) > 5
    assert sum(done.stats.target_passes for done in fast) < sum(done.stats.target_passes for done in plain)
    assert all(done.stats.tokens_per_pass == 1 for done in plain)


def test_a_request_may_decline_drafts(llm: LLM) -> None:
    with llm.with_drafter("ngram") as drafted:
        done = drafted.generate(PROMPTS[1], GREEDY, draft=DraftOptions(nodes=0))
        assert done.stats.drafted == 0
        assert drafted.generate(PROMPTS[1], GREEDY).stats.drafted > 0


def test_each_prompt_with_params_of_its_own(llm: LLM) -> None:
    many = [replace(GREEDY, max_tokens=length, ignore_eos=True) for length in (1, 5, 9, 3)]
    told: list[tuple[int, int]] = []
    done = llm.generate(PROMPTS, many, progress=lambda ready, total: told.append((ready, total)))
    assert [len(each.token_ids) for each in done] == [1, 5, 9, 3]
    assert told == [(ready, 4) for ready in range(5)]


def test_several_texts_and_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=3, logprobs=2, ignore_eos=True)
    done = llm.generate("hello", params)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in done.choices}) > 1
    for choice in done.choices:
        assert choice.logprobs is not None
        assert [each.token for each in choice.logprobs] == choice.token_ids
        assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob - 1e-6 for each in choice.logprobs)
    assert (done.text, done.token_ids, done.stats) == (
        done.choices[0].text, done.choices[0].token_ids, done.choices[0].stats
    )  # fmt: skip
    answer = json.loads(json.dumps(done.as_dict(), allow_nan=False))
    assert [choice["token_ids"] for choice in answer["choices"]] == [choice.token_ids for choice in done.choices]
    assert answer["stats"]["tokens"] == 6


# --- prompts ---------------------------------------------------------------------------------------------------


def test_forms_of_a_prompt(llm: LLM) -> None:
    tokenizer = llm.model.tokenizer
    talk = [{"role": "user", "content": "hello"}]
    assert llm.tokens("hello") == llm.tokens(talk) == tokenizer.encode(f"[user]hello{END}[assistant]")
    assert llm.tokens("hello", chat=False) == tokenizer.encode("hello") == llm.tokens(tokenizer.encode("hello"))
    chat, again = llm.generate("hello", GREEDY), llm.generate([talk, talk], GREEDY)
    assert len(again) == 2
    same(chat, again[0])
    same(chat, llm.generate(llm.tokens("hello"), GREEDY))
    same(llm.generate("hello", GREEDY, chat=False), llm.generate(tokenizer.encode("hello"), GREEDY))
    assert llm.generate("hello", GREEDY, chat=False).token_ids != chat.token_ids


def test_a_model_without_a_template_takes_plain_text(tmp_path: Path) -> None:
    with LLM(str(save_tiny_model(tmp_path, chat=False)), dtype="float32") as llm:
        assert llm.tokens("hello") == llm.tokens("hello", chat=False)
        with pytest.raises(ValueError, match="no chat template"):
            llm.generate([{"role": "user", "content": "hello"}], GREEDY)


# --- where a text ends -----------------------------------------------------------------------------------------


def test_stop_strings(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)
    stop = whole.text[4:7]
    for drafter in ("none", "ngram"):
        with llm.with_drafter(drafter) as other:
            done = other.generate(PROMPTS[1], replace(GREEDY, stop=(stop,)))
            streamed = "".join(piece.text for piece in other.stream(PROMPTS[1], replace(GREEDY, stop=(stop,))))
        assert done.text == streamed == whole.text[: whole.text.index(stop)]
        assert done.finish_reason == "stop"
        assert len(done.token_ids) < len(whole.token_ids)
        assert done.token_ids == whole.token_ids[: len(done.token_ids)]


def test_a_stop_token_is_no_part_of_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)
    last = whole.token_ids[5]
    assert last not in whole.token_ids[:5]
    done = llm.generate(PROMPTS[1], replace(GREEDY, stop_token_ids=(last,)))
    assert done.token_ids == whole.token_ids[:6]
    assert done.text == llm.model.tokenizer.decode(whole.token_ids[:5])


def test_the_end_of_a_turn_ends_the_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the model's own configuration does not call it so."""
    whole = llm.generate(PROMPTS[1], replace(GREEDY, ignore_eos=True))
    turn_end = whole.token_ids[3]
    assert turn_end not in whole.token_ids[:3]
    monkeypatch.setitem(vars(llm.model.tokenizer), "eos", frozenset({turn_end}))
    assert llm.generate(PROMPTS[1], GREEDY).token_ids == whole.token_ids[:4]
    assert llm.generate(PROMPTS[1], replace(GREEDY, ignore_eos=True)).token_ids == whole.token_ids


# --- what a user can get wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (["hello", ""], "the prompt is empty"),
        ([["hello"]], "there is no prompt in"),
        ("half \ud800", "no character at place 5"),
        ([{"role": "user", "content": "\ud800"}], "no character at place 0"),
        (7, "the prompt is 7: give a text"),
        ([1, 10**6], "the vocabulary ends at"),
        ("x" * CONTEXT, "shorten the prompt"),
        ([{"role": "user"}], "give it a role and a content"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.generate(prompt, GREEDY)
    assert llm.generate("hello", GREEDY).token_ids


@pytest.mark.parametrize("prompt", [["hello", "there"], 7, b"hello", [1, "a"], []])
def test_a_stream_has_one_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"there is no prompt in .*: give a text, a list of token ids or a list of"):
        next(iter(llm.stream(prompt, GREEDY)))


def test_one_bad_prompt_ends_the_batch(llm: LLM) -> None:
    long = replace(GREEDY, max_tokens=CONTEXT, ignore_eos=True)
    with pytest.raises(ValueError, match="shorten the prompt"):
        llm.generate(["x" * CONTEXT, "hello"], long)
    with pytest.raises(ValueError, match="shorten the prompt"):
        asyncio.run(llm.agenerate(["x" * CONTEXT, "hello"], long))
    llm.generate("hello", replace(GREEDY, max_tokens=1))  # when it is done the others have been cancelled
    assert llm._engine.cache.holders == set()


def test_other_mistakes_are_refused(folder: Path, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no drafter 'fast': use one of"):
        LLM(llm.model, "fast")
    with pytest.raises(ValueError, match="the drafter none has no option 'tree'"):
        LLM(llm.model, tree="5")
    with pytest.raises(ValueError, match="the drafter option tree is 5: give it as a text"):
        LLM(llm.model, "ngram", tree=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_batch is 0: it must be a whole number, at least 1"):
        LLM(llm.model, max_batch=0)
    with pytest.raises(ValueError, match="cache_tokens is -5"):
        LLM(llm.model, cache_tokens=-5)
    for nodes in (-1, 1.5, "3", True):
        with pytest.raises(ValueError, match="draft nodes is"):
            DraftOptions(nodes=nodes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="there is no device 'abacus'"):
        LLM(str(folder), device="abacus")
    with pytest.raises(ValueError, match="is no number format"):
        LLM(str(folder), dtype="int3")
    other = save_tiny_model(tmp_path / "other", words=("a", "Ġan"))
    with pytest.raises(ValueError, match="have different tokenizers"):
        llm.with_drafter("draft_model", drafter_options={"model": str(other)})


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu", "meta", "xpu:1"])
def test_devices_that_only_pytorch_knows_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"does not run on the device '{device}': use cpu or cuda"):
        find_device(device)


# --- coming and going ------------------------------------------------------------------------------------------


def test_leaving_a_stream_frees_the_engine(llm: LLM) -> None:
    long = replace(GREEDY, max_tokens=CONTEXT, ignore_eos=True)
    for _ in llm.stream("hello", long):
        break

    async def leave() -> None:
        async for _ in llm.astream("hello", long):
            break

    asyncio.run(leave())
    llm.generate("hello", replace(GREEDY, max_tokens=1))  # when it is done the cancellations have been seen
    assert llm._engine.cache.holders == set()


def test_cancelling_from_elsewhere_keeps_what_was_written(llm: LLM) -> None:
    writing = llm.start("hello", replace(GREEDY, max_tokens=CONTEXT, ignore_eos=True, n=2))
    pieces = writing.pieces()
    first = next(pieces)
    writing.cancel()
    seen = [first, *pieces]
    done = writing.completion()
    assert [choice.finish_reason for choice in done.choices] == ["cancelled", "cancelled"]
    assert done.choices[0].token_ids == [token for piece in seen if piece.index == 0 for token in piece.tokens]
    assert len(done.choices[0].token_ids) < 200


def test_threads_share_a_model(llm: LLM) -> None:
    expected = [llm.generate(prompt, SEEDED).token_ids for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def write(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number % 4], SEEDED).token_ids

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: expected[number % 4] for number in range(8)}


def test_a_trace_has_a_line_for_each_step(llm: LLM, tmp_path: Path) -> None:
    with llm.with_drafter("ngram", trace=tmp_path / "trace.jsonl") as traced:
        done = traced.generate("hello", GREEDY)
    records = [json.loads(entry) for entry in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(len(records)))
    assert [token for record in records for token in record["sequences"][0]["committed"]] == done.token_ids
    assert len(records) == done.stats.target_passes + done.stats.prompt_passes


def test_after_closing_nothing_is_written(llm: LLM) -> None:
    other = llm.with_drafter("none")
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.generate("hello", GREEDY)


def test_a_model_that_nobody_holds_ends_its_thread(llm: LLM) -> None:
    before = threading.active_count()
    other = llm.with_drafter("ngram")
    assert other.generate("hello", GREEDY).token_ids
    assert threading.active_count() == before + 1
    del other
    gc.collect()
    assert threading.active_count() == before


def test_a_batch_may_be_larger_than_a_chunk_of_a_prompt(folder: Path) -> None:
    with LLM(folder, dtype="float32", max_batch=600, cache_tokens=CONTEXT) as llm:
        assert len(llm.generate("hello", GREEDY).token_ids) > 0


def test_the_cache_can_be_small(llm: LLM) -> None:
    with llm.with_drafter("none", cache_tokens=64, max_batch=2) as small:
        assert small.context_length == 64
        for one, other in zip(small.generate(PROMPTS[:2], GREEDY), llm.generate(PROMPTS[:2], GREEDY), strict=True):
            assert one.token_ids == other.token_ids[: len(one.token_ids)]


def test_how_much_is_drafted_may_be_left_to_the_engine(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM(folder, "ngram", dtype="float32", adaptive=True) as adaptive, LLM(folder, dtype="float32") as plain:
        for prompt in ("one two three one two three", "again and again"):
            assert adaptive.generate(prompt, params).token_ids == plain.generate(prompt, params).token_ids
