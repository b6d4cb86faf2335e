"""What a request may not ask for, found before it would end everybody's step; and what it gets: its rule and its
noise."""

from __future__ import annotations

import secrets

import torch

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence, never
from forerun.drafters.drafter import Drafter
from forerun.engine.grammar_walk import reconciled
from forerun.engine.request import Request
from forerun.verify.rule import VerificationRule, all_rules, pair, strongest_rule

LARGEST_CHANGE = 1e30
"""Of a score, by a bias or a penalty. Far beyond what decides anything, and far below what float32 holds."""


def refuse_strays(request: Request, vocabulary: int) -> None:
    if not request.prompt:
        raise ValueError("the prompt is empty: give at least one token to go on from")
    named = [("prompt", request.prompt), ("logit_bias", list(request.params.logit_bias))]
    for name, tokens in named:
        strays = [token for token in tokens if not 0 <= token < vocabulary]
        if strays:
            raise ValueError(f"{name} names token {strays[0]}, but the vocabulary ends at {vocabulary - 1}")


def refuse_overflow(params: SamplingParams, vocabulary: int) -> None:
    """Scores that are no numbers any more."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if abs(value) > LARGEST_CHANGE or (name == "repetition_penalty" and value < 1 / LARGEST_CHANGE):
            raise ValueError(f"{name} is {value!r}, and scores would overflow: give a number of ordinary size")
    for token, bias in params.logit_bias.items():
        if bias > LARGEST_CHANGE:
            raise ValueError(f"the logit_bias of token {token} is {bias!r}, and scores would overflow: give less")
    forbidden = sum(bias < -torch.finfo(torch.float32).max for bias in params.logit_bias.values())
    if forbidden >= vocabulary:
        raise ValueError("logit_bias forbids every token: leave at least one")


def rule_for(request: Request, usual: str | None, drafter: Drafter) -> VerificationRule:
    """Its own, the `usual`, or the strongest. At temperature 0 every lossless rule gives the same text, so the cheapest
    one is taken."""
    params = request.params
    drawing, chain = drafter.drawing, not drafter.branches
    name = request.rule or usual
    if name is None:
        name = strongest_rule(drawing, chain=chain, greedy=params.greedy, seeded=params.seed is not None)
    rule = pair(name, drawing, chain=chain, greedy=params.greedy)
    return all_rules()["greedy"] if params.greedy and rule.lossless else rule


def begin_text(
    number: int,
    request: Request,
    index: int,
    prompt: list[int],
    rule: VerificationRule,
    room: int,
    usual_ends: frozenset[int],
) -> Sequence:
    """The `index`-th text of a request, for which there is `room` behind its prompt."""
    params = reconciled(request.params)
    return Sequence(
        list(prompt),
        min(params.max_tokens, room),
        frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else usual_ends),
        never if request.ends is None else request.ends(),
        id=number,
        params=params,
        seed=seed_of(params, index),
        coupled=rule.name == "gumbel",
    )


def seed_of(params: SamplingParams, index: int) -> int:
    """The first of n texts has the request's seed, the others have seeds made from it."""
    if params.seed is None:
        return secrets.randbits(63)
    return (params.seed + index * 0x9E3779B97F4A7C15) % 2**63
