"""Contexts at which the law of the next tokens is tested: places of the target's own answers.

The first token behind a context is never drafted, since it comes from the pass that reads the context. So places are
taken where the target is as good as sure of it and not of the one after: there most texts share their first token, and
what is drafted next decides. Contexts are chosen before anything is sampled, so they favour no result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.certify.target_laws import TargetLaws
from forerun.core.params import SamplingParams

ANSWER = 24
"""Tokens of an answer that are looked at."""
APART = 4
"""Between two contexts of one answer."""


def choose_contexts(
    laws: TargetLaws,
    prompts: Sequence[list[int]],
    answers: Sequence[Sequence[int]],
    params: SamplingParams,
    count: int,
) -> list[list[int]]:
    """The best place of each answer, then the second best of each, and so on."""
    ranked = [_places(laws, prompt, answer, params) for prompt, answer in zip(prompts, answers, strict=True)]
    chosen: list[list[int]] = []
    for rank in range(ANSWER):
        for prompt, answer, places in zip(prompts, answers, ranked, strict=True):
            if rank < len(places) and len(chosen) < count:
                chosen.append([*prompt, *answer[: places[rank]]])
    if len(chosen) < count:
        raise ValueError(f"there are places for {len(chosen)} contexts only: give more --prompts, or fewer --contexts")
    return chosen


def _places(laws: TargetLaws, prompt: list[int], answer: Sequence[int], params: SamplingParams) -> list[int]:
    """Places of an answer, the best first."""
    highest = laws.along(prompt, answer, params).max(1).values
    score = highest[:-1] * (1 - highest[1:])  # of the first token, of the one after
    places: list[int] = []
    for place in torch.argsort(score, descending=True, stable=True).tolist():
        if all(abs(place - other) >= APART for other in places):
            places.append(place)
    return places
