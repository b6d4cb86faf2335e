"""Five hundred random requests through a cache that is far too small, and the law of what is sampled without a seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from forerun.core.drawing import Drawing
from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter
from forerun.engine.engine import Engine
from forerun.engine.request import DraftOptions, Request
from tests.engine.test_engine import forward
from tests.engine.tiny import VOCABULARY, Nothing, RandomSamples, RandomTrees, drain, step_checked, tiny_model

MODEL = tiny_model(1)


def random_request(generator: random.Random) -> Request:
    params = SamplingParams(
        temperature=generator.choice([0, 0, 0.5, 1.0, 1.5]),
        top_k=generator.choice([0, 0, 5, 20]),
        top_p=generator.choice([1.0, 1.0, 0.9, 0.5]),
        min_p=generator.choice([0.0, 0.0, 0.1]),
        repetition_penalty=generator.choice([1.0, 1.0, 1.2]),
        frequency_penalty=generator.choice([0.0, 0.0, 0.3]),
        logit_bias=generator.choice([{}, {}, {5: 1.0}]),
        seed=generator.randrange(2**63),
        max_tokens=generator.choice([1, 2, 5, 10, 20, 40]),
        stop_token_ids=generator.choice([(), (9,)]),
        ignore_eos=generator.random() < 0.3,
        n=generator.choice([1, 1, 1, 2, 3]),
        logprobs=generator.choice([None, None, 0, 2]),
    )
    prompt = [generator.randrange(VOCABULARY) for _ in range(generator.choice([1, 2, 5, 17, 33, 60, 100]))]
    draft = DraftOptions(nodes=generator.choice([None, None, 0, 3]), depth=generator.choice([None, None, 2]))
    return Request(prompt, params, draft)


def test_five_hundred_random_requests() -> None:
    """They come at random times, a tenth of them is cancelled at some time, texts step back again and again."""
    generator = random.Random(17)
    requests = [random_request(generator) for _ in range(500)]
    alone = Engine(MODEL, Nothing(), slots=160, max_batch=1)
    expected = [drain(alone, [request])[0] for request in requests]
    hints = {tuple(r.prompt): texts[0] for r, texts in zip(requests, expected, strict=True)}
    engine = Engine(MODEL, RandomTrees(18, hints), slots=160, max_batch=6, max_rows=48)
    waiting = list(enumerate(requests))
    place: dict[int, int] = {}
    texts: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}
    preemptions = 0
    while waiting or engine.has_work:
        while waiting and generator.random() < 0.6:
            index, request = waiting.pop(0)
            place[engine.add(request)] = index
        if place and generator.random() < 0.05:
            engine.cancel(generator.choice(list(place)))
        for update in step_checked(engine):
            key = (place[update.request], update.index)
            assert key not in reasons, "nothing comes after the end"
            texts.setdefault(key, []).extend(update.tokens)
            if update.finish_reason:
                reasons[key] = update.finish_reason
                preemptions += update.statistics.preemptions
    assert len(reasons) == sum(request.params.n for request in requests)
    assert preemptions > 50
    assert engine.cache.free_blocks == engine.cache.total_blocks
    finished = [key for key, reason in reasons.items() if reason != "cancelled"]
    assert len(finished) > 400
    assert len(finished) < len(reasons)
    for index, number in finished:
        assert texts[index, number] == expected[index][number]
    for (index, number), text in texts.items():  # also a cancelled one is a beginning of its text
        assert expected[index][number][: len(text)] == text


SAMPLED: dict[str, tuple[Drafter, str | None]] = {
    "plain": (Nothing(), None),
    "sampled chain, block": (RandomSamples(20, paths=1), None),
    "sampled chain, rejection": (RandomSamples(21, paths=1), "chain_rejection"),
    "sampled tree": (RandomSamples(22, paths=3), None),
    "fixed tree": (RandomTrees(23), None),
    "fixed tree, sample and match": (RandomTrees(24), "sample_match"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_without_a_seed_the_law_is_the_targets(name: str) -> None:
    """The first two tokens, by enumeration and by chi-square; with top_k 3 there are nine outcomes."""
    drafter, rule = SAMPLED[name]
    params = SamplingParams(temperature=1.1, top_k=3, frequency_penalty=0.7, max_tokens=2, ignore_eos=True, n=1000)
    prompt = [11, 22, 33, 7]
    bare = replace(params, n=1)
    first = law(forward(MODEL, prompt)[-1:], replace_penalty(bare))[0]
    expected: dict[tuple[int, int], float] = {}
    for one in first.nonzero()[:, 0].tolist():
        logits = forward(MODEL, [*prompt, one])[-1:].clone()
        logits[0, one] -= params.frequency_penalty
        second = law(logits, replace_penalty(bare))[0]
        for two in second.nonzero()[:, 0].tolist():
            expected[one, two] = float(first[one] * second[two])
    counts = dict.fromkeys(expected, 0)
    engine = Engine(MODEL, drafter, slots=4096, max_batch=64, max_rows=4096, rule=rule)
    for _ in range(4):
        for text in drain(engine, [Request(prompt, params)])[0]:
            counts[text[0], text[1]] += 1  # a pair that cannot occur is a KeyError
    total = sum(counts.values())
    observed = torch.tensor([counts[pair] for pair in expected], dtype=torch.float64)
    wanted = torch.tensor([expected[pair] for pair in expected], dtype=torch.float64) * total
    wanted *= observed.sum() / wanted.sum()
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4


def replace_penalty(params: SamplingParams) -> LawSettings:
    """The penalty is applied by hand above."""
    return LawSettings.of([replace(params, frequency_penalty=0.0)])


def test_the_test_would_notice_a_wrong_law() -> None:
    """Sampled drafts verified as if they were fixed are off; the engine refuses the pair, so it is forced here."""
    assert RandomSamples(0, paths=1).drawing is Drawing.IID
