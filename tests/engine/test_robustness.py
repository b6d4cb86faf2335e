"""Five hundred random requests through a cache that is far too small, and the law of what is sampled without a seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.drafters.drafter import Drafter
from forerun.engine.engine import Engine
from forerun.engine.request import DraftOptions, Request
from forerun.verify.rule import BatchNoise, all_rules
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


PROMPT = [7]  # of a single token, so that the very first step drafts
PARAMS = SamplingParams(temperature=1.1, top_k=3, frequency_penalty=0.7, max_tokens=2, ignore_eos=True, n=1000)


def expected_pairs() -> dict[tuple[int, int], float]:
    """The law of the first two tokens, by enumeration; with top_k 3 there are nine outcomes."""
    bare = LawSettings.of([replace(PARAMS, n=1, frequency_penalty=0.0)])  # the penalty is applied by hand
    first = law(forward(MODEL, PROMPT)[-1:], bare)[0]
    pairs: dict[tuple[int, int], float] = {}
    for one in first.nonzero()[:, 0].tolist():
        logits = forward(MODEL, [*PROMPT, one])[-1:].clone()
        logits[0, one] -= PARAMS.frequency_penalty
        second = law(logits, bare)[0]
        for two in second.nonzero()[:, 0].tolist():
            pairs[one, two] = float(first[one] * second[two])
    return pairs


PAIRS = expected_pairs()
LIKELY = sorted({token for pair in PAIRS for token in pair})
SAMPLED: dict[str, tuple[Drafter, str | None]] = {
    "plain": (Nothing(), None),
    "sampled chain, block": (RandomSamples(20, 1, LIKELY), None),
    "sampled chain, rejection": (RandomSamples(21, 1, LIKELY), "chain_rejection"),
    "sampled tree": (RandomSamples(22, 3, LIKELY), None),
    "fixed tree": (RandomTrees(23, likely=LIKELY), None),
    "fixed tree, sample and match": (RandomTrees(24, likely=LIKELY), "sample_match"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_without_a_seed_the_law_is_the_targets(name: str) -> None:
    drafter, rule = SAMPLED[name]
    counts = dict.fromkeys(PAIRS, 0)
    engine = Engine(MODEL, drafter, slots=4096, max_batch=64, max_rows=4096, rule=rule)
    for _ in range(4):
        for text in drain(engine, [Request(PROMPT, PARAMS)])[0]:
            counts[text[0], text[1]] += 1  # a pair that cannot occur is a KeyError
    assert name == "plain" or engine.statistics.accepted > 200, "drafts must be accepted, or nothing is tested"
    observed = torch.tensor(list(counts.values()), dtype=torch.float64)
    wanted = torch.tensor(list(PAIRS.values()), dtype=torch.float64)
    wanted *= observed.sum() / wanted.sum()
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4


def test_a_wrong_pair_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled drafts judged as if they were fixed by a rule that trusts them: the chi-square must see it. The engine
    refuses such a pair, so the rule itself is spoiled here: it accepts every first draft."""
    rule = all_rules()["block"]

    def trusting(tree: DraftTree, p: torch.Tensor, noise: BatchNoise) -> Verdict:
        assert tree.q is not None
        return rule.batched(replace(tree, q=p[:, : tree.q.shape[1]]), p, noise)  # as if q were p: always accepted

    monkeypatch.setitem(all_rules(), "block", replace(rule, batched=trusting))
    with pytest.raises((AssertionError, KeyError)):
        test_without_a_seed_the_law_is_the_targets("sampled chain, block")
