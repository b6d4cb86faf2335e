"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from forerun.core.params import SamplingParams
from forerun.core.sequence import FinishReason, Sequence
from forerun.engine.grammar_walk import Walk
from forerun.engine.statistics import Statistics
from forerun.verify.rule import VerificationRule

Kind = Literal["accepted", "corrected", "bonus"]
Ends = Callable[[list[int]], bool]
"""Whether a text ends here, asked after each token with the output so far."""


@dataclass(frozen=True)
class DraftOptions:
    """How far this request lets the drafter go; None leaves it to the drafter."""

    nodes: int | None = None
    """Drafted tokens per step, 0 for plain decoding."""
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "depth"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"draft {name} is {value!r}: it must be a whole number, 0 (do not speculate) or more")


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    draft: DraftOptions = field(default_factory=DraftOptions)
    rule: str | None = None
    """The verification rule; None takes the strongest lossless one."""
    ends: Callable[[], Ends] | None = None
    """Makes the watcher for stop strings, one for each of the n texts."""


@dataclass(frozen=True)
class TokenLogprob:
    """Under the model's own law, before the request's transform."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Update:
    """What a step did to one text."""

    request: int
    index: int
    tokens: list[int]
    kinds: list[Kind]
    """One for each token: an accepted draft, the target's correction of a refused one, or its own token where nothing
    was drafted."""
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    statistics: Statistics
    """Of this text so far."""


@dataclass(eq=False)
class Job:
    """One text on its way through the engine."""

    request: int
    index: int
    sequence: Sequence
    rule: VerificationRule
    draft: DraftOptions
    statistics: Statistics = field(default_factory=Statistics)
    walk: Walk | None = None
    """Through its grammar, if it has one."""

    @property
    def order(self) -> int:
        """Who came first goes first, also after a preemption."""
        return self.sequence.id
