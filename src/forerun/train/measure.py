"""The measure that matters: how many tokens the target writes in a pass when a drafter drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.core.params import SamplingParams
from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import to_tokens
from forerun.train.prompts import Prompt
from forerun.train.writing import drafted

CHAIN = 4
"""Drafts a step, one behind the other: a measure that compares, whatever trees are used later."""


def held_back_tokens(loaded: LoadedModel, prompts: Sequence[Prompt], longest: int, answer: int) -> list[list[int]]:
    """The first turns, but for those that leave no room for an answer."""
    tokens = [to_tokens(prompt.turns[0], loaded.tokenizer, chat=None) for prompt in prompts]
    fitting = [own for own in tokens if len(own) + answer <= longest]
    if not fitting:
        raise ValueError("the prompts that were held back are all too long to be answered: give some shorter ones")
    return fitting


def tokens_per_pass(
    loaded: LoadedModel,
    make: Callable[[Setup], Drafter],
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    longest: int,
) -> float:
    """Greedy, by the engine itself."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return drafted(loaded, make, prompts, params, longest).tokens_per_pass
