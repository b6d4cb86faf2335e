"""The measure that matters: how many tokens the target writes in a pass when the student drafts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.core.params import SamplingParams
from forerun.engine.loaded import LoadedModel
from forerun.engine.prompts import to_tokens
from forerun.models.transformer import Transformer
from forerun.train.answers import open_llm
from forerun.train.prompts import Prompt
from forerun.train.student import frozen

CHAIN = "4"


def held_back_tokens(loaded: LoadedModel, prompts: Sequence[Prompt], longest: int, answer: int) -> list[list[int]]:
    """The first turns, but for those that leave no room for an answer."""
    tokens = [to_tokens(prompt.turns[0], loaded.tokenizer, chat=None) for prompt in prompts]
    fitting = [own for own in tokens if len(own) + answer <= longest]
    if not fitting:
        raise ValueError("the prompts that were held back are all too long to be answered: give some shorter ones")
    return fitting


def tokens_per_pass(
    loaded: LoadedModel, student: Transformer, prompts: Sequence[list[int]], *, max_tokens: int, longest: int
) -> float:
    """Greedy, with the drafter `draft_model` and a chain of four, by the engine itself."""
    target = loaded.target
    assert isinstance(target, Transformer)
    draft = frozen(student, target.dtype)
    beside = replace(loaded, load_beside=lambda name: draft)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with open_llm(beside, longest, "draft_model", drafter_options={"model": "student"}, tree=CHAIN) as llm:
        llm.generate(list(prompts), params)
        return llm.statistics.tokens_per_pass
