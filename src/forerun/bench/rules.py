"""How many tokens each verification rule commits per step, on synthetic wide laws (`synthetic` says which).

Rules that verify the same drawing see the same laws, drafts and seeds, and a gain is the mean of paired differences.
A chain is the leftmost path of the tree of its drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.bench.synthetic import Chunk, Drafts, Family, variation
from forerun.core.drawing import race_children, top_children
from forerun.core.shape import TreeShape
from forerun.theory import checks
from forerun.trees.static import cartesian
from forerun.verify.rule import pair

CANDIDATES = (1, 2, 4)
"""How many candidates the match at the root is reported for."""
SIGNIFICANT = 3.0
"""A gain counts from so many standard errors on."""


@dataclass(frozen=True)
class Settings:
    distances: tuple[float, ...] = (0.1, 0.2, 0.33, 0.5)
    vocabulary: int = 2000
    samples: int = 4000
    depth: int = 4
    spread: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.distances:
            raise ValueError("there is no distance: give at least one")
        for distance in self.distances:
            if not 0.01 <= checks.number("distance", distance) <= 0.9:
                raise ValueError(f"distance is {distance:g}: give a total variation between 0.01 and 0.9")
        checks.whole("vocabulary", self.vocabulary, 16, 1 << 18)
        checks.whole("samples", self.samples, 2, 10_000_000)
        checks.whole("depth", self.depth, 1, 16)
        checks.whole("seed", self.seed, 0, 1 << 32)
        if not 0.1 <= checks.number("spread", self.spread) <= 10:
            raise ValueError(f"spread is {self.spread:g}: give a number between 0.1 and 10")

    @property
    def widths(self) -> tuple[int, ...]:
        """The tree: two children per node on the first two levels, one on each further level."""
        return tuple(2 if level < 2 else 1 for level in range(self.depth))


@dataclass(frozen=True)
class Entry:
    """One line of the table: a rule, the drafts it verifies, and on which shape."""

    label: str
    rule: str
    drafts: Drafts
    chain: bool = False


ENTRIES = (
    Entry("chain_rejection", "chain_rejection", Drafts.SAMPLED, chain=True),
    Entry("block", "block", Drafts.SAMPLED, chain=True),
    Entry("gumbel_1", "gumbel", Drafts.COUPLED, chain=True),
    Entry("recursive_iid", "recursive_iid", Drafts.SAMPLED),
    Entry("k_seq", "k_seq", Drafts.SAMPLED),
    Entry("recursive_without_replacement", "recursive_without_replacement", Drafts.WITHOUT_REPLACEMENT),
    Entry("traversal", "traversal", Drafts.WITHOUT_REPLACEMENT),
    Entry("recursive_fixed", "recursive_fixed", Drafts.TOP),
    Entry("sample_match", "sample_match", Drafts.TOP),
    Entry("gumbel_2", "gumbel", Drafts.COUPLED),
)
COMPARISONS = (
    ("block", "chain_rejection"),
    ("traversal", "recursive_without_replacement"),
    ("gumbel_2", "recursive_fixed"),
)


@dataclass(frozen=True)
class Mean:
    value: float
    error: float  # standard error

    @classmethod
    def of(cls, samples: Tensor) -> Mean:
        wide = samples.to(torch.float64)
        return cls(float(wide.mean()), float(wide.std()) / math.sqrt(len(wide)))


@dataclass(frozen=True)
class Row:
    label: str
    rule: str
    drafts: str
    nodes: int  # rows of the target's pass, the root's included
    tokens: Mean  # committed per step
    first: Mean  # how often a step accepts any draft


@dataclass(frozen=True)
class Gain:
    """How many more tokens per step `better` commits than `than`, with the error of the paired difference."""

    better: str
    than: str
    tokens: Mean
    relative: float
    significant: bool

    @classmethod
    def of(cls, better: str, than: str, accepted: dict[str, Tensor]) -> Gain:
        tokens = Mean.of(accepted[better] - accepted[than])
        relative = tokens.value / (1 + float(accepted[than].to(torch.float64).mean()))
        return cls(better, than, tokens, relative, tokens.value > SIGNIFICANT * tokens.error)


@dataclass(frozen=True)
class RootMatch:
    """How often the target's first token is among the candidates at the root."""

    candidates: int
    coupled: Mean  # the first arrivals under q in the target's own race
    fixed: Mean  # the likeliest tokens under q


@dataclass(frozen=True)
class Level:
    """What was measured at one distance."""

    distance: float  # asked for
    total_variation: Mean  # measured, over all nodes with children
    noise: float  # τ
    rules: tuple[Row, ...]
    gains: tuple[Gain, ...]
    root: tuple[RootMatch, ...]

    def tokens(self, label: str) -> Mean:
        return next(row.tokens for row in self.rules if row.label == label)


@dataclass(frozen=True)
class Measurement:
    settings: Settings
    levels: tuple[Level, ...]

    def as_dict(self) -> dict[str, Any]:
        """Names and numbers, ready for JSON."""
        return {
            "what": "tokens committed per step by each verification rule, on synthetic laws",
            "laws": "p = softmax(spread · normal); q = softmax(the same logits + noise · normal); fresh at every node",
            "tree": list(self.settings.widths),
            **asdict(self),
        }


def measure(settings: Settings, advance: Callable[[int], None] = lambda done: None) -> Measurement:
    """`advance` hears of samples done: `settings.samples` for each distance, in all."""
    shape = cartesian(settings.widths)
    family = Family(settings.vocabulary, settings.spread, settings.seed)
    noises = family.noises(settings.distances)
    tallies = [_Tally([], [], []) for _ in settings.distances]
    for chunk in family.chunks(shape, settings.samples):
        for noise, tally in zip(noises, tallies, strict=True):
            tally.add(chunk, chunk.drafter(noise))
            advance(len(chunk.p))
    found = zip(settings.distances, noises, tallies, strict=True)
    return Measurement(settings, tuple(tally.level(distance, noise, shape) for distance, noise, tally in found))


@dataclass(frozen=True)
class _Tally:
    """What the chunks gave at one distance."""

    accepted: list[dict[str, Tensor]]  # drafts [B] by label
    variations: list[Tensor]  # [B]
    matches: list[Tensor]  # [B, 2, candidates]

    def add(self, chunk: Chunk, q: Tensor) -> None:
        tokens = {drafts: chunk.draft(drafts, q) for drafts in Drafts}
        self.accepted.append({entry.label: _accepted(entry, chunk, tokens[entry.drafts], q) for entry in ENTRIES})
        self.variations.append(variation(chunk.p[:, : q.shape[1]], q).mean(-1))
        self.matches.append(_root_matches(chunk, q))

    def level(self, distance: float, noise: float, shape: TreeShape) -> Level:
        accepted = {entry.label: torch.cat([chunk[entry.label] for chunk in self.accepted]) for entry in ENTRIES}
        rows = []
        for entry in ENTRIES:
            drafts = accepted[entry.label]
            nodes = shape.depth + 1 if entry.chain else shape.size
            means = Mean.of(drafts + 1), Mean.of(drafts > 0)
            rows.append(Row(entry.label, entry.rule, entry.drafts.value, nodes, *means))
        matches = torch.cat(self.matches)
        root = [RootMatch(k, Mean.of(matches[:, 0, i]), Mean.of(matches[:, 1, i])) for i, k in enumerate(CANDIDATES)]
        gains = [Gain.of(better, than, accepted) for better, than in COMPARISONS]
        return Level(distance, Mean.of(torch.cat(self.variations)), noise, tuple(rows), tuple(gains), tuple(root))


def _accepted(entry: Entry, chunk: Chunk, tokens: Tensor, q: Tensor) -> Tensor:
    """[B] how many drafts the rule accepts."""
    tree, p = (chunk.chain if entry.chain else chunk.tree)(entry.drafts, tokens, q)
    rule = pair(entry.rule, tree.drawing, chain=entry.chain, greedy=False)
    return rule.verify(tree, p, chunk.noise).lengths


def _root_matches(chunk: Chunk, q: Tensor) -> Tensor:
    """[B, 2, candidates]: whether the target's first token is among the coupled candidates, and the probability
    that it is among the likeliest ones."""
    p, race, most = chunk.p[:, 0], chunk.races[0], max(CANDIDATES)
    hit = race_children(q[:, 0], race, most) == (p / race).argmax(-1, keepdim=True)
    held = p.gather(1, top_children(q[:, 0], most))
    ranks = [count - 1 for count in CANDIDATES]
    return torch.stack([hit.to(torch.float64), held.to(torch.float64)], 1).cumsum(-1)[..., ranks]
