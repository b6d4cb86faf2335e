"""What some answers took and brought, as sums that add up over categories and fit into JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from forerun.bench.cases import Place
from forerun.engine.statistics import PHASES, Statistics


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    seconds: float
    """Of this request: from its first step in a closed batch, from its arrival otherwise."""
    first_token_seconds: float | None = None
    statistics: Statistics = field(default_factory=Statistics)
    """What is not known of a peer stays 0."""


@dataclass(frozen=True)
class Work:
    """What answering some prompts took in all."""

    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, as the engine's clock has them; empty for peers."""
    cache_bytes: int | None = None
    """The most that texts held of the cache."""
    reserved_bytes: int | None = None
    """All of the cache, held or not."""

    def __add__(self, other: Work) -> Work:
        phases = {name: self.phases.get(name, 0.0) + other.phases.get(name, 0.0) for name in self.phases | other.phases}
        held = [size for size in (self.cache_bytes, other.cache_bytes) if size is not None]
        reserved = [size for size in (self.reserved_bytes, other.reserved_bytes) if size is not None]
        return Work(self.seconds + other.seconds, phases, max(held, default=None), max(reserved, default=None))


def counted(token_ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The one way tokens are counted, for us and for peers: ids of the target's tokenizer, up to the one that ends the
    text."""
    for place, token in enumerate(token_ids):
        if token in ends:
            return list(token_ids[: place + 1])
    return list(token_ids)


@dataclass
class Sums:
    """Over the answers of one category in one round."""

    tokens: int = 0
    passes: int = 0
    """Of the target; in a batch one for each text that it decided something for."""
    drafted: int = 0
    accepted: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """A step counts once for each of its texts, as passes do."""
    prompt_phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of these, up to the first token of each answer."""
    request_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """A digest of each text: equal exactly where the tokens are."""

    def count(self, answer: Answer) -> None:
        own = answer.statistics
        self.tokens += len(answer.token_ids)
        self.passes += own.target_passes
        self.drafted += own.drafted
        self.accepted += own.accepted
        self.offered_by_depth = _added(self.offered_by_depth, own.offered_by_depth)
        self.accepted_by_depth = _added(self.accepted_by_depth, own.accepted_by_depth)
        for name in PHASES:
            self.phases[name] += own.seconds[name]
            self.prompt_phases[name] += own.seconds_to_first[name]
        self.request_seconds.append(answer.seconds)
        if answer.first_token_seconds is not None:
            self.first_token_seconds.append(answer.first_token_seconds)
        self.texts.append(hashlib.blake2b(repr(answer.token_ids).encode(), digest_size=6).hexdigest())

    @classmethod
    def together(cls, several: Iterable[Sums]) -> Self:
        total = cls()
        for one in several:
            total.tokens += one.tokens
            total.passes += one.passes
            total.drafted += one.drafted
            total.accepted += one.accepted
            total.offered_by_depth = _added(total.offered_by_depth, one.offered_by_depth)
            total.accepted_by_depth = _added(total.accepted_by_depth, one.accepted_by_depth)
            for name in PHASES:
                total.phases[name] += one.phases[name]
                total.prompt_phases[name] += one.prompt_phases[name]
            total.request_seconds += one.request_seconds
            total.first_token_seconds += one.first_token_seconds
            total.texts += one.texts
        return total


@dataclass(frozen=True)
class Cell:
    """One method under one setting in one round on one pool of questions: what was measured, or what went wrong."""

    place: Place
    error: str | None = None
    work: Work = Work(0.0)
    peak_bytes: int | None = None
    sums: dict[str, Sums] = field(default_factory=dict)
    """By category."""

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return {**data.pop("place"), **data}


def _added(left: list[int], right: list[int]) -> list[int]:
    longest = max(len(left), len(right))
    pad = [left + [0] * (longest - len(left)), right + [0] * (longest - len(right))]
    return [a + b for a, b in zip(*pad, strict=True)]
