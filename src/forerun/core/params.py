"""What a request asks for: how its tokens are drawn, and where its text ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.core.grammar import Grammar

_LARGEST = sys.float_info.max
"""Compared with this, NaN, infinity and whole numbers too long for a float all fail."""


def _refuse(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{name} is {value!r}: it must be {wanted}")


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one request. The same settings make the target's law p and the draft's q.

    Order: penalties, logit_bias and the outside mask change the logits; then temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 takes the most likely token, 1 samples from the model's own law."""
    top_k: int = 0
    """Keep the k most likely tokens, and all that tie with the k-th. 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together hold at least this much probability, ties included."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the output holds it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the named token ids; -inf forbids a token."""
    seed: int | None = None
    """With a seed the text is the same whatever drafts it and whatever else runs."""
    max_tokens: int = 256
    """The text ends after this many tokens, if nothing ends it before."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, as the model's own end-of-text tokens do."""
    ignore_eos: bool = False
    """Go on after an end-of-text token, until max_tokens."""
    n: int = 1
    """How many texts to write for the prompt."""
    logprobs: int | None = None
    """With 0 or more: log probabilities of every token, and of that many most likely ones, from the model's own law
    (before temperature, penalties and truncation)."""
    grammar: Grammar | None = None
    """What the text must look like, made by `forerun.engine.grammar`. Its mask is part of the law of every token."""

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
                raise _refuse(name, value, "a finite number")
        optional = [name for name in ("seed", "logprobs") if getattr(self, name) is not None]
        for name in ("top_k", "max_tokens", "n", *optional):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise _refuse(name, value, "a whole number")
        if self.temperature < 0:
            raise _refuse("temperature", self.temperature, "0 (greedy) or more")
        if not 0 <= self.top_k < 2**63:
            raise _refuse("top_k", self.top_k, "0 (keep all) or more, and below 2**63")
        if not 0 < self.top_p <= 1:
            raise _refuse("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise _refuse("min_p", self.min_p, "between 0 and 1")
        if self.repetition_penalty <= 0:
            raise _refuse("repetition_penalty", self.repetition_penalty, "above 0 (1 changes nothing)")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise _refuse("seed", self.seed, "between 0 and 2**63 - 1")
        if self.max_tokens < 1:
            raise _refuse("max_tokens", self.max_tokens, "at least 1")
        if not 1 <= self.n <= 1024:
            raise _refuse("n", self.n, "between 1 and 1024")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1024:
            raise _refuse("logprobs", self.logprobs, "between 0 and 1024")
        grammar: object = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            raise _refuse("grammar", grammar, "made by json_schema, lark or regex of forerun.engine.grammar")
        stop: object = self.stop
        if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
            raise _refuse("stop", self.stop, "a tuple of strings that are not empty")
        ids: object = self.stop_token_ids
        if not isinstance(ids, tuple):
            raise _refuse("stop_token_ids", ids, "a tuple of token ids")
        bias: object = self.logit_bias
        if not isinstance(bias, Mapping):
            raise _refuse("logit_bias", bias, "a mapping from token ids to numbers")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise _refuse("stop_token_ids", token, "a tuple of token ids")
        for token, added in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise _refuse("logit_bias", token, "keyed by token ids")
            number = isinstance(added, int | float) and not isinstance(added, bool)
            if not (number and (added == -math.inf or abs(added) <= _LARGEST)):
                raise _refuse(f"logit_bias[{token}]", added, "a number below infinity")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
