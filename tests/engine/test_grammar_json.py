"""Structured output by llguidance: every answer parses and fits its schema, whatever drafts it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from benchmarks.schemas import SCHEMAS, prompt_for

from forerun import LLM, Completion, DraftOptions, SamplingParams
from forerun.engine.grammar import Grammar, json_object, json_schema, lark, regex
from forerun.engine.loaded import LoadedModel
from forerun.models.builtin import BUILTINS
from forerun.models.store import Store
from forerun.models.tokenizer import Tokenizer
from tests.tiny_folder import save_tiny_model

PROMPT = "hello"
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", words=("the", "Ġthe", '",', '":', "name", "ab"))
    return LoadedModel.load(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return model.tokenizer


@pytest.fixture(scope="module")
def llm(model: LoadedModel) -> Iterator[LLM]:
    with LLM(model) as llm:
        yield llm


def texts(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(choice.token_ids, choice.finish_reason) for each in completions for choice in each.choices]


def all_schemas(tokenizer: Tokenizer, params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, grammar=json_schema(schema, tokenizer)) for schema in SCHEMAS.values()]


def check_answers(answers: list[Completion]) -> None:
    for answer, schema in zip(answers, SCHEMAS.values(), strict=True):
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


PROMPTS = [prompt_for(name, 0) for name in SCHEMAS]


@pytest.fixture(scope="module", params=[{"seed": 1}, {"temperature": 0}], ids=["seeded", "greedy"])
def wanted(llm: LLM, request: pytest.FixtureRequest) -> tuple[list[SamplingParams], list[Completion]]:
    """The letters of this model are noise, so that only the grammar makes JSON of them."""
    params = all_schemas(llm.model.tokenizer, SamplingParams(max_tokens=400, **request.param))
    answers = llm.generate(PROMPTS, params)
    check_answers(answers)
    return params, answers


@pytest.mark.parametrize("drafter", ["ngram", "recycling", "layer_skip"])
def test_every_answer_is_the_same_with_every_drafter(
    model: LoadedModel, wanted: tuple[list[SamplingParams], list[Completion]], drafter: str
) -> None:
    with LLM(model, drafter=drafter) as drafting:
        assert texts(drafting.generate(PROMPTS, wanted[0])) == texts(wanted[1])


@pytest.mark.parametrize("drafter", ["suffix", "layer_skip"])
def test_every_answer_without_a_seed_fits_its_schema(model: LoadedModel, drafter: str) -> None:
    with LLM(model, drafter=drafter) as drafting:
        check_answers(drafting.generate(PROMPTS, all_schemas(model.tokenizer, SamplingParams(max_tokens=400))))


def test_drafts_drawn_from_a_model_fit_too(model: LoadedModel) -> None:
    """Sampled trees, judged by rules that look at the draws; the draft model is the target itself, which knows no
    grammar."""
    with LLM(
        model, drafter="draft_model", drafter_options={"model": str(model.folder), "tree": "2,2"}, rule="traversal"
    ) as drafting:
        check_answers(drafting.generate(PROMPTS, all_schemas(model.tokenizer, SamplingParams(max_tokens=400))))
        assert drafting.statistics.accepted > 0


def test_a_regular_expression_is_matched_as_a_whole(llm: LLM, tokenizer: Tokenizer) -> None:
    pattern = "(yes|no), because [a-z]{3,8}[.]"
    done = llm.generate(PROMPT, SamplingParams(grammar=regex(pattern, tokenizer), n=8))
    assert all(re.fullmatch(pattern, choice.text) for choice in done.choices)
    assert all(choice.finish_reason == "stop" for choice in done.choices)
    assert len({choice.text for choice in done.choices}) > 1
    assert done.choices[0].stats.tokens_per_pass > 1.5, "what is forced is drafted, though no drafter is there"


def test_the_text_may_end_where_the_grammar_can(llm: LLM, tokenizer: Tokenizer) -> None:
    """`(ab)*` can end at each pair; the model's end-of-text token comes there and nowhere else."""
    grammar = regex("(ab)+", tokenizer)
    done = llm.generate(PROMPT, SamplingParams(grammar=grammar, n=30, max_tokens=40, logit_bias={_end(tokenizer): 4.0}))
    assert all(re.fullmatch("(ab)+", choice.text) for choice in done.choices if choice.finish_reason == "stop")
    ended = [choice for choice in done.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(choice.token_ids[-1] == _end(tokenizer) for choice in ended)
    endless = llm.generate(PROMPT, SamplingParams(grammar=grammar, max_tokens=11, ignore_eos=True))
    assert (endless.choices[0].finish_reason, len(endless.choices[0].token_ids)) == ("length", 11)


def _end(tokenizer: Tokenizer) -> int:
    (end,) = tokenizer.eos
    return end


def test_max_tokens_and_stop_strings_cut(llm: LLM, tokenizer: Tokenizer) -> None:
    grammar = json_schema(SCHEMAS["person"], tokenizer)
    whole = llm.generate(PROMPT, SamplingParams(grammar=grammar, seed=4))
    cut = llm.generate(PROMPT, SamplingParams(grammar=grammar, seed=4, max_tokens=9))
    assert cut.choices[0].token_ids == whole.choices[0].token_ids[:9]
    assert cut.choices[0].finish_reason == "length"
    stopped = llm.generate(PROMPT, SamplingParams(grammar=grammar, seed=4, stop=('"age"',)))
    assert stopped.text == whole.text[: whole.text.index('"age"')]
    assert stopped.choices[0].finish_reason == "stop"


def test_penalties_logprobs_and_speculation_off(llm: LLM, tokenizer: Tokenizer) -> None:
    params = SamplingParams(
        grammar=json_schema(SCHEMAS["order"], tokenizer),
        seed=9,
        n=2,
        logprobs=2,
        presence_penalty=0.7,
        repetition_penalty=1.2,
        top_p=0.9,
    )
    on, off = llm.generate(PROMPT, params), llm.generate(PROMPT, params, draft=DraftOptions(nodes=0))
    assert texts([on]) == texts([off])
    for choice in on.choices:
        jsonschema.validate(json.loads(choice.text), SCHEMAS["order"])
        assert choice.logprobs is not None
        assert [each.token for each in choice.logprobs] == choice.token_ids
    assert all(choice.stats.drafted == 0 for choice in off.choices)


def test_lark_and_any_object(llm: LLM, tokenizer: Tokenizer) -> None:
    sums = lark('start: NUMBER ("+" NUMBER)* "="\nNUMBER: /[1-9][0-9]?/\n', tokenizer)
    for seed in range(4):
        done = llm.generate(PROMPT, SamplingParams(grammar=sums, seed=seed, max_tokens=200))
        assert done.choices[0].finish_reason == "length" or re.fullmatch(r"[0-9]+([+][0-9]+)*=", done.text)
    (brace,), (quote,) = tokenizer.encode("}"), tokenizer.encode('"')
    params = SamplingParams(grammar=json_object(tokenizer), seed=2, max_tokens=300, logit_bias={brace: 6.0, quote: 2.0})
    done = llm.generate(PROMPT, params)
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(done.text), dict)


# --- states --------------------------------------------------------------------------------------------------------


def test_a_state_depends_on_its_tokens_alone(tokenizer: Tokenizer) -> None:
    """Random walks down and up again: masks are those of a state that has never gone back."""
    rng = np.random.default_rng(0)
    width = max(tokenizer.vocab.values()) + 8
    for name in ("order", "shape", "event"):
        grammar = json_schema(SCHEMAS[name], tokenizer)
        state, taken = grammar.start(), list[int]()
        for _ in range(40):
            if taken and rng.random() < 0.3:
                count = int(rng.integers(1, len(taken) + 1))
                state.back(count)
                del taken[len(taken) - count :]
            allowed = state.allowed(width).nonzero()[:, 0].tolist()
            if allowed:
                taken.append(int(rng.choice(allowed)))
                assert state.take(taken[-1]), "what the mask allows can be taken"
            assert not state.take(width - 1)
            assert not state.take(_end(tokenizer))
            fresh = grammar.start()
            assert all(fresh.take(token) for token in taken)
            assert torch.equal(state.allowed(width), fresh.allowed(width))
            assert (state.forced(), state.may_end, state.must_end) == (fresh.forced(), fresh.may_end, fresh.must_end)
            assert not state.allowed(width)[-8:].any(), "columns without a token"


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t: json_schema({"type": "strin"}, t), "JSON schema cannot be used"),
        (lambda t: json_schema("{not json", t), "JSON schema cannot be used"),
        (lambda t: json_schema("[1]", t), "no object"),
        (lambda t: json_schema('{"items":' * 5000 + "{}" + "}" * 5000, t), "JSON schema cannot be used .*recursion"),
        (lambda t: json_schema({"type": "object", "default": {1, 2}}, t), "JSON schema cannot be used"),
        (lambda t: json_schema({"enum": []}, t), "JSON schema cannot be used"),
        (lambda t: lark("start: missing", t), 'Lark grammar cannot be used .*unknown name: "missing"'),
        (lambda t: lark(5, t), "no text"),  # type: ignore[arg-type]
        (lambda t: regex("[a-", t), "regular expression cannot be used"),
        (lambda t: regex("", t), "empty text alone"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_sentence(tokenizer: Tokenizer, make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make(tokenizer)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_without_the_library_the_fix_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'forerun[serve]'")):
        regex("a", tokenizer)


def test_a_grammar_is_shared(tokenizer: Tokenizer) -> None:
    grammar = regex("ab+", tokenizer)
    assert isinstance(grammar, Grammar)
    one, other = grammar.start(), grammar.start()
    (letter,) = tokenizer.encode("a")
    assert one.take(letter)
    assert other.allowed(300)[letter]
    assert not one.allowed(300)[letter]


# --- the default model ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not BUILTINS[NAME].path(Store.default()).exists(),
    reason=f"{NAME} is not in the cache: run `forerun models fetch {NAME}`",
)
@pytest.mark.xdist_group("real model")
def test_the_default_model_answers_in_json(tmp_path: Path) -> None:
    model = LoadedModel.load(NAME, device="cpu", offline=True)
    names = ["weather", "sentiment"]
    prompts = [prompt_for(name, 2) for name in names]
    found = []
    for drafter in ("none", "recycling"):
        with LLM(model, drafter=drafter) as llm:
            params = [
                SamplingParams(seed=3, max_tokens=200, grammar=json_schema(SCHEMAS[name], model.tokenizer))
                for name in names
            ]
            answers = llm.generate(prompts, params)
        for answer, name in zip(answers, names, strict=True):
            jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
        found.append(texts(answers))
    assert found[0] == found[1]
