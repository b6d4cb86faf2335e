"""Synthetic laws and drafts from them, for measuring rules without a model.

The laws: p is the softmax of independent normal logits of standard deviation `spread`, and q the softmax of the
same logits plus τ times fresh normal noise, with τ such that the mean total variation between p and q is the one
asked for. At a spread of 3, the four likeliest of 2,000 tokens hold 0.44 of p: no few tokens dominate.

Every node of every tree has a pair (p, q) of its own, as under a model that looks at the whole path. Two independent
draws of the same token are two nodes here; a step enters at most one of them, so counts stay right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from forerun.core.drawing import Drawing, iid_children, race_children, top_children
from forerun.core.law import LawSettings, law
from forerun.core.noise import Purpose, StepNoise, row_key
from forerun.core.params import SamplingParams
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree

_CALIBRATION = 1 << 20  # probabilities that τ is found on
_LARGEST_NOISE = 32.0
_MEMORY = 192 << 20  # bytes that one chunk of samples holds, about; making laws takes as much again for a moment


class Drafts(Enum):
    """Where the candidates of a tree come from."""

    SAMPLED = "sampled"
    """Independent samples of q."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Samples of q without replacement."""
    TOP = "top"
    """The likeliest tokens of q."""
    COUPLED = "coupled"
    """The first arrivals under q in the race that decides the target's token."""

    @property
    def drawing(self) -> Drawing:
        sampled = {Drafts.SAMPLED: Drawing.IID, Drafts.WITHOUT_REPLACEMENT: Drawing.WITHOUT_REPLACEMENT}
        return sampled.get(self, Drawing.FIXED)  # coupled candidates are a function of the context and the seed


@dataclass(frozen=True)
class Family:
    """The laws above."""

    vocabulary: int
    spread: float
    seed: int

    def noises(self, distances: Iterable[float]) -> list[float]:
        """τ for each distance, by bisection on pairs that are not used again."""
        generator = self._generator(-1)
        rows = max(64, _CALIBRATION // self.vocabulary)
        logits = torch.randn(rows, self.vocabulary, generator=generator).mul_(self.spread)
        normal = torch.randn(rows, self.vocabulary, generator=generator)
        p = _laws(logits)

        def distance(noise: float) -> float:
            return float(variation(p, _laws(torch.add(logits, normal, alpha=noise))).mean())

        def solve(asked: float) -> float:
            low, high = 0.0, 1.0
            while distance(high) < asked:
                low, high = high, 2 * high
                if high > _LARGEST_NOISE:
                    raise ValueError(f"distance {asked:g} is out of reach: give a smaller one, or a larger vocabulary")
            while high - low > 1e-3 * high:
                middle = (low + high) / 2
                low, high = (middle, high) if distance(middle) < asked else (low, middle)
            return (low + high) / 2

        return [solve(asked) for asked in distances]

    def chunks(self, shape: TreeShape, samples: int) -> Iterator[Chunk]:
        """So many trees of that shape (all its inner nodes first), as many at a time as memory allows."""
        # Rows of V float32 per sample: p, and for an inner node logits, noise, q and a race of eight bytes.
        rows = shape.size + 5 * _inner(shape) + 2 * shape.depth
        size = max(1, _MEMORY // (4 * self.vocabulary * rows))
        for start in range(0, samples, size):
            yield self._chunk(shape, start, min(size, samples - start))

    def _chunk(self, shape: TreeShape, start: int, count: int) -> Chunk:
        generator = self._generator(start)
        inner = _inner(shape)
        logits = torch.randn(count, shape.size, self.vocabulary, generator=generator).mul_(self.spread)
        normal = torch.randn(count, inner, self.vocabulary, generator=generator)
        seeds = (self.seed << 24) + start + torch.arange(count)
        noise = StepNoise(seeds, torch.ones_like(seeds))  # the roots stand at position 0
        return Chunk(
            shape,
            _laws(logits),
            logits[:, :inner],
            normal,
            noise,
            [noise.race(torch.full_like(seeds, depth), self.vocabulary) for depth in range(shape.depth)],
            [noise.draft_race(torch.full_like(seeds, node), self.vocabulary) for node in range(inner)],
        )

    def _generator(self, start: int) -> torch.Generator:
        """Normal numbers for the samples from `start` on. Torch's generator on a CPU reads 32 bits of a seed."""
        key = int(row_key(torch.tensor(self.seed), torch.tensor(start), Purpose.DRAFT))
        return torch.Generator().manual_seed(key & 0xFFFFFFFF)


@dataclass(frozen=True)
class Chunk:
    """B samples: what does not depend on the distance. I of the N nodes are inner ones, and come first."""

    shape: TreeShape
    p: Tensor  # [B, N, V]
    logits: Tensor  # [B, I, V]
    normal: Tensor  # [B, I, V]
    noise: StepNoise
    races: list[Tensor]  # [B, V] for each depth: those that pick the target's tokens
    draft_races: list[Tensor]  # [B, V] for each inner node: the drafter's own

    def drafter(self, noise: float) -> Tensor:
        """q [B, I, V] at τ = `noise`."""
        return _laws(torch.add(self.logits, self.normal, alpha=noise))

    def draft(self, drafts: Drafts, q: Tensor) -> Tensor:
        """[B, N] the tokens of the trees; the roots' are 0."""
        tokens = torch.zeros(self.p.shape[:2], dtype=torch.int64)
        for node in range(q.shape[1]):
            children = list(self.shape.children[node])
            tokens[:, children] = self._children(drafts, q[:, node], node, len(children))
        return tokens

    def _children(self, drafts: Drafts, q: Tensor, node: int, count: int) -> Tensor:
        if drafts is Drafts.TOP:
            return top_children(q, count)
        if drafts is Drafts.SAMPLED:
            return iid_children(q, self.noise.draft(torch.full_like(self.noise.seeds, node), count))
        coupled = drafts is Drafts.COUPLED
        race = self.races[self.shape.depths[node]] if coupled else self.draft_races[node]
        return race_children(q, race, count)

    def tree(self, drafts: Drafts, tokens: Tensor, q: Tensor) -> tuple[DraftTree, Tensor]:
        """The whole trees, and p [B, N, V]."""
        return self._filled(self.shape, drafts, tokens, q), self.p

    def chain(self, drafts: Drafts, tokens: Tensor, q: Tensor) -> tuple[DraftTree, Tensor]:
        """Their leftmost paths as chains of γ drafts, and p [B, 1 + γ, V]."""
        path = [0]
        while children := self.shape.children[path[-1]]:
            path.append(children[0])
        shape = TreeShape.chain(len(path) - 1)
        return self._filled(shape, drafts, tokens[:, path], q[:, path[:-1]]), self.p[:, path]

    def _filled(self, shape: TreeShape, drafts: Drafts, tokens: Tensor, q: Tensor) -> DraftTree:
        roots = torch.zeros_like(tokens[:, 0])
        return DraftTree.from_shape(shape, tokens, roots, drafts.drawing, q=q if drafts.drawing.sampled else None)


def variation(p: Tensor, q: Tensor) -> Tensor:
    """The total variation between laws [..., V]."""
    return (p - q).abs_().sum(-1).div_(2)


def _laws(logits: Tensor) -> Tensor:
    """logits [..., V] at temperature 1."""
    flat = logits.flatten(0, -2)
    settings = LawSettings.of([SamplingParams()]).take(torch.zeros(len(flat), dtype=torch.int64))
    return law(flat, settings).view_as(logits)


def _inner(shape: TreeShape) -> int:
    """How many nodes have children."""
    return sum(1 for children in shape.children if children)
