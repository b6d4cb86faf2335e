"""The law of sampled text against the target's exact probabilities.

Many texts are written behind each of some contexts, and five kinds of tests look at them:

- next tokens: behind a context and each beginning that many of its texts share, the counts of the next token;
- together: the sum of these statistics, for an error that is small everywhere;
- all places: a token x that is drawn from p puts Σ_{y likelier} p(y) + v·p(x) uniformly on [0, 1), v uniform, whatever
  came before. So all places of all texts make one test, of what is likelier or less likely than it should be;
- drafts: whether they come out as often as they should (`drafts.py`);
- whole texts: against texts that the target wrote plainly.

The first token of a text comes from the pass that reads the prompt, where nothing is drafted, and is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.certify.partings import Parting, stray
from forerun.certify.statistics import Fit, fit, same_source, samples_for, survival, visible_error
from forerun.certify.subject import Told, Written, write
from forerun.certify.target_laws import TargetLaws
from forerun.core.params import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.request import Request

DEPTH = 3
"""Beginnings have up to so many tokens."""
SHARED = 25
"""Texts that share a beginning, from which on the next token is tested."""
BINS = 10
KINDS = 5
"""Of tests: each gets its share of the false alarms that are allowed."""
ERROR = 0.01
"""The total variation whose price in samples is told."""


@dataclass(frozen=True)
class Observed:
    """What texts look like beside the exact laws."""

    fits: list[Fit]
    places: Fit
    strays: list[Parting]
    """Tokens that the law forbids, up to the first one that rounding does not explain."""


@dataclass(frozen=True)
class LawTest:
    """One kind of tests."""

    tests: int
    samples: int
    """Tokens, or texts."""
    p_value: float
    """The smallest one, corrected for all tests of the certificate."""
    visible_error: float | None
    """The total variation from which on an error is seen with a chance of 95%, for next tokens at the best-known
    beginning."""
    samples_for_error: int | None
    """How many samples would see an error of 1%."""


@dataclass(frozen=True)
class Distance:
    """Of a lossy mode: the mean total variation of the next token's law, over places where many texts met or, where
    they never did, over all. `noise` is what the target's own texts seem to be off by, because samples are few."""

    total_variation: float
    noise: float
    samples: int


def sample(
    engine: Engine, contexts: Sequence[list[int]], params: SamplingParams, count: int, seed: int, rule: str | None,
    what: str, told: Told,
) -> list[list[Written]]:  # fmt: skip
    """`count` texts behind each context, each with a seed of its own."""
    asked = [
        Request(context, replace(params, seed=seed + place * count + number), rule=rule)
        for place, context in enumerate(contexts)
        for number in range(count)
    ]
    texts = write(engine, asked, lambda done, of: told(what, done, of))
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def observe(
    laws: TargetLaws, contexts: Sequence[list[int]], texts: Sequence[list[Written]], params: SamplingParams, seed: int,
    told: Told,
) -> Observed:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    fits: list[Fit] = []
    quantiles: list[Tensor] = []
    strays: list[Parting] = []
    total = sum(map(len, texts))
    told("Reading the target's laws", 0, total)
    for context, own in zip(contexts, texts, strict=True):
        beginnings = Counter(
            tuple(text.tokens[:d]) for text in own for d in range(1, DEPTH + 1) if len(text.tokens) > d
        )
        wanted = {beginning for beginning, count in beginnings.items() if count >= SHARED}
        exact: dict[tuple[int, ...], Tensor] = {}
        counts: dict[tuple[int, ...], Tensor] = {}
        for text in own:
            tokens = torch.tensor(text.tokens)
            p = laws.along(context, text.tokens[:-1], params)  # [L, V]
            for depth in range(1, min(DEPTH + 1, len(text.tokens))):
                beginning = tuple(text.tokens[:depth])
                if beginning in wanted:
                    exact.setdefault(beginning, p[depth].clone())
                    counts.setdefault(beginning, torch.zeros(p.shape[1]))[text.tokens[depth]] += 1
            drawn = p.gather(1, tokens[:, None])
            v = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
            likelier, equal = (torch.where(which, p, 0.0).double().sum(1) for which in (p > drawn, p == drawn))
            quantiles.append((likelier + v * equal)[1:])
            impossible = (drawn[1:, 0] == 0).nonzero()[:, 0] + 1
            for place in impossible.tolist():
                if all(each.tie for each in strays):
                    strays.append(stray(laws, len(quantiles) - 1, context, text.tokens, place, params))
            told("Reading the target's laws", len(quantiles), total)
        tested = [fit(counts[beginning], exact[beginning]) for beginning in sorted(exact)]
        fits += [each for each in tested if each is not None]
    bins = (torch.cat(quantiles) * BINS).long().clamp_max(BINS - 1)
    places = fit(torch.bincount(bins, minlength=BINS), torch.full((BINS,), 1 / BINS, dtype=torch.float64))
    if places is None:
        raise ValueError("there are too few tokens to test: raise --samples or --length")
    return Observed(fits, places, strays)


def law_tests(
    observed: Observed,
    drafts: Fit | None,
    texts: Sequence[list[Written]],
    plain: Sequence[list[Written]],
    alarm: float,
    settings: int,
    seed: int,
) -> dict[str, LawTest]:
    """By kind. `alarm` is the chance of a false alarm that a certificate allows itself over all tests at all of its
    `settings`; p-values are corrected so that they are compared with it."""
    shares = KINDS * settings
    fits, places = observed.fits, observed.places
    found = {}
    if fits:
        best = max(fits, key=lambda each: each.samples)
        own = alarm / (shares * len(fits))
        samples = sum(each.samples for each in fits)
        found["next tokens"] = LawTest(
            len(fits),
            samples,
            min(1.0, shares * len(fits) * min(each.p_value for each in fits)),
            visible_error(best.samples, best.freedom, own),
            samples_for(ERROR, best.freedom, own),
        )
        statistic, freedom = sum(each.statistic for each in fits), sum(each.freedom for each in fits)
        found["together"] = _single(samples, statistic, freedom, shares, alarm)
    found["all places"] = _single(places.samples, places.statistic, places.freedom, shares, alarm)
    if drafts is not None:
        found["drafts"] = _single(drafts.samples, drafts.statistic, drafts.freedom, shares, alarm)
    pairs = [
        ([text.tokens for text in one], [text.tokens for text in other])
        for one, other in zip(texts, plain, strict=True)
    ]
    value = min(1.0, shares * same_source(pairs, seed))
    found["whole texts"] = LawTest(1, sum(map(len, texts)) + sum(map(len, plain)), value, None, None)
    return found


def _single(samples: int, statistic: float, freedom: int, shares: int, alarm: float) -> LawTest:
    return LawTest(
        1,
        samples,
        min(1.0, shares * survival(statistic, freedom)),
        visible_error(samples, freedom, alarm / shares),
        samples_for(ERROR, freedom, alarm / shares),
    )


def distance(observed: Observed, plainly: Observed) -> Distance:
    met = observed.fits and plainly.fits
    own, right = (observed.fits, plainly.fits) if met else ([observed.places], [plainly.places])
    return Distance(_mean_error(own), _mean_error(right), sum(each.samples for each in own))


def _mean_error(fits: Sequence[Fit]) -> float:
    return sum(each.total_variation * each.samples for each in fits) / sum(each.samples for each in fits)
