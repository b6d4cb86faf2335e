"""Where two texts that should be the same part, and whether rounding alone explains it.

Passes of different shapes round differently, so two tokens that are as good as equally likely may change places. That
is a tie if their scores lie closer together than rounding moves logits here; anything else is a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.certify.target_laws import TargetLaws, untruncated
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams


@dataclass(frozen=True)
class Parting:
    text: int
    """Which of the texts."""
    place: int
    plain: int | None
    drafted: int | None
    """The two tokens; None where a text had ended."""
    gap: float | None
    """Between the logits of the two, or between a token's and those that top-k, top-p or min-p kept."""
    rounding: float | None
    tie: bool


def parting(
    laws: TargetLaws,
    number: int,
    prompt: list[int],
    plain: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
) -> Parting | None:
    """Of two texts after one prompt; with a seed in `params` both were drawn with its noise."""
    if list(plain) == list(drafted):
        return None
    both = zip(plain, drafted, strict=False)
    place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain), len(drafted)))
    if place >= min(len(plain), len(drafted)):
        one, other = (text[place] if place < len(text) else None for text in (plain, drafted))
        return Parting(number, place, one, other, gap=None, rounding=None, tie=False)
    a, b, before = plain[place], drafted[place], list(plain[:place])
    score = laws.along(prompt, before, untruncated(params))[-1].double().log()
    outside = 0.0
    if not params.greedy:
        kept = laws.along(prompt, before, params)[-1] > 0
        outside = max(_outside(score, kept, token) for token in (a, b))
        assert params.seed is not None
        position = len(laws.target.begin(-1, prompt)) + place
        laws.target.forget(-1)
        noise = StepNoise(torch.tensor([params.seed]), torch.tensor([position]))
        score = score - noise.race(torch.tensor([0]), score.shape[0])[0].log()
    gap = (params.temperature or 1.0) * max(outside, abs(float(score[a] - score[b])) if not outside else 0.0)
    rounding = laws.rounding(prompt, before)
    return Parting(number, place, a, b, gap, rounding, gap <= rounding)


def _outside(score: Tensor, kept: Tensor, token: int) -> float:
    """How far a token lies below those that truncation kept; 0 for one of them."""
    return 0.0 if kept[token] else float(score[kept].min() - score[token])


def stray(
    laws: TargetLaws, number: int, prompt: list[int], text: Sequence[int], place: int, params: SamplingParams
) -> Parting:
    """A token that the target's law forbids: its distance to what the law allows."""
    before = list(text[:place])
    score = laws.along(prompt, before, untruncated(params))[-1].double().log()
    kept = laws.along(prompt, before, params)[-1] > 0
    gap = params.temperature * _outside(score, kept, text[place])
    rounding = laws.rounding(prompt, before)
    return Parting(number, place, None, text[place], gap, rounding, gap <= rounding)
