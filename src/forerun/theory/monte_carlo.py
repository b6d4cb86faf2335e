"""Speculative steps with coins instead of models: what the closed forms say on average, seen happening.

Nothing of a closed form is used here. A chain step tosses one coin per draft and stops at the first failure;
a tree step walks from the root, one draw per level. Rounds are rows of arrays, in blocks to bound memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from forerun.core.shape import TreeShape
from forerun.theory import checks
from forerun.theory.closed_form import RankAcceptance, rank_table

Progress = Callable[[int], None]
"""Called with the number of rounds just done."""

BLOCK = 1 << 21  # random numbers held at once; a constant, so that a seed means the same everywhere
OPENING = 32
MOST_ROUNDS = 100_000_000  # minutes of work; the standard error is far below what is shown
LONGEST = 4096  # drafts of a simulated chain; more would need the memory of a block for one round


@dataclass(frozen=True)
class Simulation:
    """`histogram[k]` of the rounds committed k tokens; `opening` is how many the first rounds committed."""

    histogram: tuple[int, ...]
    opening: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @cached_property
    def mean(self) -> float:
        return sum(tokens * count for tokens, count in enumerate(self.histogram)) / self.rounds

    @cached_property
    def standard_error(self) -> float:
        """Of the mean: √(s²/n) with the n − 1 estimate of s²."""
        squares = sum(count * (tokens - self.mean) ** 2 for tokens, count in enumerate(self.histogram))
        return math.sqrt(squares / (self.rounds - 1) / self.rounds)


def simulate_chain(
    alpha: float, gamma: int, rounds: int, seed: int = 0, progress: Progress | None = None
) -> Simulation:
    """γ drafts per step, each accepted with probability α independently of the others."""
    alpha = checks.probability("alpha", alpha)
    return simulate_depths([alpha] * checks.whole("gamma", gamma, most=LONGEST), rounds, seed, progress)


def simulate_depths(
    by_depth: Sequence[float], rounds: int, seed: int = 0, progress: Progress | None = None
) -> Simulation:
    """A chain whose draft at each depth has its own acceptance, given that the one before it was accepted."""
    chances = [checks.probability(f"acceptance at depth {depth + 1}", a) for depth, a in enumerate(by_depth)]

    def step(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        accepted = generator.random((count, len(chances))) < np.asarray(chances)  # [count, γ]
        # A draft stands only if all before it do; then one token of the target follows.
        drafts: NDArray[np.int64] = np.logical_and.accumulate(accepted, axis=1).sum(axis=1, dtype=np.int64)
        return 1 + drafts

    return _collect(step, len(chances), numbers_per_round=len(chances), rounds=rounds, seed=seed, progress=progress)


def simulate_tree(
    shape: TreeShape, ranks: RankAcceptance, rounds: int, seed: int = 0, progress: Progress | None = None
) -> Simulation:
    """Walk the tree: at each node the b-th child is accepted with probability a_b, or else the step ends."""
    table = rank_table(shape, ranks)
    width = shape.width
    # Rows are nodes, and one more at the end where a walk that has stopped stays: it has no children.
    child = np.full((shape.size + 1, width + 1), shape.size)
    threshold = np.zeros((shape.size + 1, width))  # a_1 + … + a_b: child b is taken for u between two of these
    for node, children in enumerate(shape.children):
        if children:
            child[node, : len(children)] = children
            threshold[node, : len(children)] = np.cumsum(table[shape.depths[node]][: len(children)])
            threshold[node, len(children) :] = threshold[node, len(children) - 1]

    def step(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        at, tokens = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
        for _ in range(shape.depth):
            taken = (generator.random((count, 1)) >= threshold[at]).sum(axis=1)  # [count, width] → rank
            at = child[at, taken]
            tokens += at != shape.size
        return tokens

    return _collect(step, shape.depth, numbers_per_round=width, rounds=rounds, seed=seed, progress=progress)


def _collect(
    step: Callable[[np.random.Generator, int], NDArray[np.int64]],
    depth: int,
    *,
    numbers_per_round: int,
    rounds: int,
    seed: int,
    progress: Progress | None,
) -> Simulation:
    rounds = checks.whole("rounds", rounds, least=2, most=MOST_ROUNDS)  # one round has no standard error
    generator = np.random.default_rng(checks.whole("seed", seed))
    histogram = np.zeros(depth + 2, dtype=np.int64)
    opening: list[int] = []
    for count in _blocks(rounds, max(1, BLOCK // max(1, numbers_per_round))):
        tokens = step(generator, count)
        histogram += np.bincount(tokens, minlength=depth + 2)
        opening.extend(tokens[: OPENING - len(opening)].tolist())
        if progress is not None:
            progress(count)
    return Simulation(tuple(histogram.tolist()), tuple(opening))


def _blocks(rounds: int, size: int) -> Iterator[int]:
    for start in range(0, rounds, size):
        yield min(size, rounds - start)
