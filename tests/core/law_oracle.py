"""The law of one row, written token by token in plain Python: what `law` has to agree with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.params import SamplingParams


@dataclass(frozen=True)
class Row:
    """One row of a call: its logits, its settings and what its penalties and its mask see."""

    logits: list[float]
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    allowed: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Answer:
    law: list[float]
    margin: float
    """How far the nearest top_p or min_p decision is from tipping over: below the rounding of a float type,
    either answer is right."""


def scores_of(row: Row) -> list[float]:
    """Logits after penalties, bias and mask."""
    counts = Counter(row.output + row.path)
    seen = set(row.prompt) | set(counts)
    scores = []
    for token, logit in enumerate(row.logits):
        score = logit
        if token in seen:
            score = score / row.params.repetition_penalty if score > 0 else score * row.params.repetition_penalty
        if counts[token] > 0:
            score -= row.params.presence_penalty
        score -= row.params.frequency_penalty * counts[token]
        score += row.params.logit_bias.get(token, 0.0)
        if row.allowed is not None and not row.allowed[token]:
            score = -math.inf
        scores.append(score)
    return scores


def answer(row: Row) -> Answer:
    params, scores = row.params, scores_of(row)
    best = max(scores)
    if params.temperature == 0:
        first = scores.index(best)
        return Answer([float(token == first) for token in range(len(scores))], math.inf)
    scores = [(score - best) / params.temperature for score in scores]
    if 0 < params.top_k < len(scores):
        kth = sorted(scores, reverse=True)[params.top_k - 1]
        scores = [score if score >= kth else -math.inf for score in scores]
    weights = [math.exp(score) for score in scores]
    law = [weight / math.fsum(weights) for weight in weights]
    top, margin = max(law), math.inf
    kept = [True] * len(law)
    if params.top_p < 1:
        # Whole groups of ties come in, the likeliest first, until they hold top_p.
        for value in sorted(set(law)):
            above = math.fsum(p for p in law if p > value)
            margin = min(margin, abs(above - params.top_p))
            kept = [keep and not (p == value and above >= params.top_p) for keep, p in zip(kept, law, strict=True)]
    if params.min_p > 0:
        for token, p in enumerate(law):
            if p != top:
                margin = min(margin, abs(p / top - params.min_p))
            kept[token] = kept[token] and p >= params.min_p * top
    law = [p if keep else 0.0 for p, keep in zip(law, kept, strict=True)]
    total = math.fsum(law)
    return Answer([p / total for p in law], margin)


def mask_of(rows: Sequence[Row]) -> list[list[bool]] | None:
    if all(row.allowed is None for row in rows):
        return None
    return [list(row.allowed) if row.allowed is not None else [True] * len(row.logits) for row in rows]
