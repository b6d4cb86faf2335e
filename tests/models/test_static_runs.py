"""Runs of plain decoding and steps of all kinds on the static pass: bounds, broken models, and chance."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.planted import Planted
from forerun.drafters.none import NoDrafter
from forerun.engine import engine as engine_module
from forerun.engine import packing
from forerun.engine.engine import Engine
from forerun.engine.laws import StepLaws
from forerun.engine.request import Request
from forerun.kernels.attention import tree_attention
from forerun.models.transformer import Transformer
from tests.models.rows import VOCABULARY, tiny, with_static_pass
from tests.models.test_static import DRAFTERS, SHAPES, drafter, models


def finish(engine: Engine) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    while engine.has_work:
        for update in engine.step():
            texts.setdefault(update.request, []).extend(update.tokens)
        engine.check_integrity()
        unused = engine.cache.unused_slots()
        for tensor in (*engine.cache.storage.keys, *engine.cache.storage.values):
            tensor[unused] = 1e3  # what stands there must not matter
    return texts


def alone(plain: Transformer, request: Request) -> list[int]:
    engine = Engine(plain, NoDrafter(), slots=512)
    number = engine.add(request)
    return finish(engine)[number]


def settings(chosen: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3},
        {"temperature": 0.8, "min_p": 0.05, "seed": 5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "presence_penalty": 0.7},
        {"temperature": 0.7, "seed": 9, "logit_bias": {4: 3.0}},
        {"temperature": 0.0, "logprobs": 2},
    ]
    stops = (chosen.randrange(VOCABULARY),) if chosen.random() < 0.3 else ()
    return SamplingParams(**chosen.choice(kinds), max_tokens=chosen.randint(1, 24), stop_token_ids=stops)


@pytest.mark.parametrize("seed", range(24))
def test_by_chance(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any drafter, settings, batch and cache, requests that come and go: every text is that of lone plain decoding."""
    chosen = random.Random(seed)
    plain, static = models(chosen.choice(["two share, tied", "windows", "one head each"]))
    if chosen.random() < 0.5:
        monkeypatch.setattr(packing, "HOST", torch.device("meta"))
    batch = chosen.choice([1, 2, 3, 5])
    engine = Engine(
        static,
        drafter(chosen.choice(DRAFTERS), static),
        slots=chosen.choice([96, 160, 400]),
        max_batch=batch,
        max_rows=chosen.choice([batch + 1, 24, 512]),
        max_ahead=chosen.choice([1, 2, 5, 8, 64]),
        max_drafting=chosen.choice([1, 2, 100]),
        prompts_alone=chosen.random() < 0.3,
    )
    asked: dict[int, Request] = {}
    texts: dict[int, list[int]] = {}
    left = 6
    while left or engine.has_work:
        if left and (chosen.random() < 0.5 or not engine.has_work):
            left -= 1
            prompt = [chosen.randrange(VOCABULARY) for _ in range(chosen.randint(1, 40))]
            request = Request(prompt if chosen.random() < 0.5 else (prompt[:4] * 10)[: len(prompt)], settings(chosen))
            asked[engine.add(request)] = request
        for update in engine.step():
            texts.setdefault(update.request, []).extend(update.tokens)
            assert (update.logprobs is None) == (asked[update.request].params.logprobs is None)
        engine.check_integrity()
    monkeypatch.undo()
    for number, request in asked.items():
        assert texts[number] == alone(plain, request), (number, request)


def test_a_run_ends_with_the_context_and_with_the_cache() -> None:
    """Where the next run would reach beyond either, it is shorter."""
    config = replace(SHAPES["one head each"], context_length=61)
    plain, static = (tiny(config, dtype=torch.float32) for _ in range(2))
    with_static_pass(static)
    request = Request([5] * 40, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    short = Request([6] * 3, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    for slots in (512, 112):  # in the second they do not fit both, and one steps back
        engine = Engine(static, NoDrafter(), slots=slots, max_ahead=64)
        numbers = [engine.add(each) for each in (request, short)]
        texts = finish(engine)
        assert [texts[number] for number in numbers] == [alone(plain, each) for each in (request, short)]
        assert len(texts[numbers[0]]) == 21


GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 1}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
OTHERWISE: dict[str, Any] = {**DRAWN, "rule": "sample_match"}


@pytest.mark.parametrize(
    ("kinds", "together"),
    [
        ([GREEDY, SEEDED], True),
        ([GREEDY, DRAWN], True),
        ([GREEDY, OTHERWISE], True),
        ([SEEDED, DRAWN], True),
        ([SEEDED, OTHERWISE], False),
        ([GREEDY, SEEDED, OTHERWISE], False),
    ],
)
def test_texts_of_different_rules_do_not_share_a_run(kinds: list[dict[str, Any]], together: bool) -> None:
    """But for greedy ones, whose law has one token, whichever way it is drawn."""
    plain, static = models("two share, tied")
    requests = []
    for number, kind in enumerate(kinds):
        params = {name: value for name, value in kind.items() if name != "rule"}
        asked = SamplingParams(**params, max_tokens=13)
        requests.append(Request([5, 6, 7 + number], asked, rule=kind.get("rule")))
    engine = Engine(static, NoDrafter(), slots=512, max_ahead=12)
    for request in requests:
        engine.add(request)
    texts: dict[int, list[int]] = {}
    steps = 0
    while engine.has_work:
        steps += 1
        for update in engine.step():
            texts.setdefault(update.request, []).extend(update.tokens)
    assert [texts[number] for number in sorted(texts)] == [alone(plain, request) for request in requests]
    assert all(len(text) == 13 for text in texts.values())
    assert steps == (2 if together else 13)  # the prompt, and then all that is left


class Breaks:
    """A head that is right for some passes and then is not."""

    def __init__(self, model: Transformer, passes: int) -> None:
        self.run, self.left = model.static.rows.run, passes  # type: ignore[union-attr]
        model.static.rows.run = self  # type: ignore[union-attr, method-assign]

    def __call__(self, *given: Any) -> Any:
        result = self.run(*given)
        self.left -= 1
        if self.left < 0:
            result = replace(result, logits=torch.full_like(result.logits, torch.nan))
            result = replace(result, likeliest=torch.full_like(result.likeliest, -1))
        return result


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("ahead", [1, 8])
def test_a_model_that_breaks_in_the_middle_is_refused(params: dict[str, Any], ahead: int) -> None:
    """Also within a run, and the texts are as they were."""
    broken = tiny(SHAPES["one head each"], dtype=torch.float32)
    with_static_pass(broken)
    engine = Engine(broken, NoDrafter(), slots=64, max_ahead=ahead)
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, **params)))
    engine.step()
    Breaks(broken, 2 if ahead > 1 else 0)
    before = [job.sequence.tokens[:] for job in engine.scheduler.running]
    with pytest.raises(ValueError, match="NaN"):
        engine.step()
    assert [job.sequence.tokens for job in engine.scheduler.running] == before
    engine.check_integrity()


def test_broken_rows_are_refused_where_rules_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where the laws themselves are not asked whether they are numbers."""

    class Trusting(StepLaws):
        def __init__(self, *given: Any, checked: bool = False) -> None:
            super().__init__(*given, checked=True)

    monkeypatch.setattr(engine_module, "StepLaws", Trusting)
    broken = tiny(SHAPES["one head each"], dtype=torch.float32)
    broken.lm_head.weight.data[3] = torch.nan
    with_static_pass(broken)
    engine = Engine(broken, NoDrafter(), slots=128, max_ahead=1)
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}):
        engine.add(Request([1, 2, 3], SamplingParams(max_tokens=4, **params)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        engine.step()


def test_a_greedy_step_makes_no_tensors_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    _, static = models("two share, tied")
    engine = Engine(static, drafter("ngram", static), slots=512)
    engine.add(Request([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    monkeypatch.setattr(Planted, "columns", lambda tree: pytest.fail("a tensor was asked for"))
    finish(engine)


def test_what_was_captured_goes_with_the_cache() -> None:
    _, static = models("one head each")
    assert static.static is not None
    before = len(static.static.captured)
    for _ in range(3):
        engine = Engine(static, NoDrafter(), slots=64)
        engine.add(Request([1, 2], SamplingParams(temperature=0.0, max_tokens=3)))
        finish(engine)
    assert len(static.static.captured) == before + 1  # that of the engine which is still there
    del engine
    assert len(static.static.captured) == before


def test_without_its_kernels_the_plain_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, static = models("one head each")
    assert static.writes_ahead
    assert static.static is not None
    monkeypatch.setattr(static.static, "device", torch.device("cuda"))
    monkeypatch.setattr(tree_attention, "broken", "no compiler")
    assert [static.writes_ahead, static.static.usable] == [False, False]
