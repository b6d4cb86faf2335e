"""Which drafter, how long a draft or how large a tree: what measured times and acceptances recommend.

For every batch size all settings are compared by their expected speedup against plain decoding,

    speedup = E[tokens] · t(1) / (t(rows) + depth · t_draft + overhead),

t(rows) being the target's pass with that many rows per sequence. Plain decoding, with speedup 1, takes part
and wins ties: speculation that gains nothing is not worth having. The tree of a given size and depth comes
from a function that is passed in (`forerun.trees.optimal.best_shape`): theory does not build trees. Standard
errors are those of the acceptance; times are taken as exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forerun.core.shape import TreeShape
from forerun.theory import checks, closed_form
from forerun.theory.measurements import Acceptance, DrafterMeasurements, Measurements, TargetPasses

BestShape = Callable[[Sequence[float], int, int], tuple[TreeShape, float]]
"""(acceptance by rank, most nodes with the root, most levels) → (the best tree, its expected tokens)."""

# What is tried. More would take minutes and gain nothing: long before, a draft is unlikely to be reached.
LONGEST_CHAIN = 64
MOST_CHILDREN = 16  # of a node of a tree
DEEPEST_TREE = 8  # levels, when the measurements give no max_depth
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
ROWS = (*range(2, 33), *range(36, 65, 4), 80, 96, 112, 128, 160, 192, 224, 256)  # of a tree
# (rows² + 2000) · children · levels, over all trees: about two seconds. The largest trees are left out first.
WORK = 220_000_000
PER_DRAFTER = 2  # settings of one drafter that are listed as alternatives


@dataclass(frozen=True)
class Setting:
    """One way to decode at one batch size, and what to expect from it."""

    drafter: str
    kind: Literal["plain", "chain", "tree"]
    shape: TreeShape
    tokens_per_pass: float
    step_ms: float
    speedup: float
    standard_error: float | None = None  # of the speedup; None where the sample count is not known

    @property
    def rows(self) -> int:
        return self.shape.size

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def what(self) -> str:
        if self.kind == "plain":
            return "plain decoding"
        if self.kind == "chain":
            return f"chain of {self.depth}"
        return f"tree of {self.rows - 1}, {self.depth} deep"


@dataclass(frozen=True)
class Recommendation:
    """The best setting at a batch size, and the next ones in falling order. Plain decoding is among them."""

    batch: int
    best: Setting
    alternatives: tuple[Setting, ...]

    @property
    def speculate(self) -> bool:
        return self.best.kind != "plain"

    @property
    def sure(self) -> bool:
        """Whether the gain is at least two standard errors; unknown errors count as none."""
        return self.best.speedup - 2.0 * (self.best.standard_error or 0.0) > 1.0

    @property
    def advice(self) -> str:
        best = self.best
        if not self.speculate:
            return "Do not speculate: no drafter is expected to beat plain decoding."
        text = f"Use {best.drafter} with a {best.what}: {best.tokens_per_pass:.2f} tokens per pass, "
        text += f"{best.speedup:.2f}× plain decoding"
        if best.standard_error is not None:
            text += f" (± {best.standard_error:.3f})"
        return f"{text}." if self.sure else f"{text}; within two standard errors of no gain, so measure more."


@dataclass(frozen=True)
class _Draft:
    """A shape that a drafter may draft: what it yields does not depend on the batch size, only its time does."""

    shape: TreeShape
    tokens: float
    error: float | None  # of the tokens


def recommend(measurements: Measurements, best_shape: BestShape) -> tuple[Recommendation, ...]:
    """One recommendation per measured batch size."""
    most_rows = max(passes.ms.most_rows for passes in measurements.passes)
    trees = sum(drafter.kind == "tree" for drafter in measurements.drafters)
    shape_of = cache(best_shape)  # drafters may share their acceptance
    drafts = []
    for drafter in measurements.drafters:
        shapes = _shapes(drafter, most_rows, shape_of, WORK // max(1, trees))
        drafts.append((drafter, [_draft(drafter.acceptance, shape) for shape in shapes]))
    return tuple(_recommend(passes, drafts) for passes in measurements.passes)


def _recommend(passes: TargetPasses, drafts: Sequence[tuple[DrafterMeasurements, list[_Draft]]]) -> Recommendation:
    plain_ms = passes.ms.one_row
    ranked = [Setting("plain", "plain", TreeShape.chain(0), 1.0, plain_ms, 1.0, 0.0)]
    for drafter, tried in drafts:
        # Nothing is known of passes with more rows than were measured.
        settings = [_setting(drafter, each, passes) for each in tried if each.shape.size <= passes.ms.most_rows]
        # Of equally fast ones the smaller: it leaves room for other sequences.
        settings.sort(key=lambda setting: (-setting.speedup, setting.rows))
        ranked += settings[:PER_DRAFTER]
    # Rounded, so that the last digit cannot put a draft that gains nothing ahead of plain decoding.
    ranked.sort(key=lambda setting: (-round(setting.speedup, 12), setting.rows))
    best, *others = ranked
    return Recommendation(passes.batch, best, tuple(others))


def _shapes(drafter: DrafterMeasurements, most_rows: int, best_shape: BestShape, work: int) -> Iterator[TreeShape]:
    """Every shape worth a look, as far as the work allows."""
    most_rows = min(most_rows, drafter.max_rows or most_rows)
    if drafter.kind == "chain":
        longest = min(most_rows - 1, drafter.max_depth or LONGEST_CHAIN, LONGEST_CHAIN)
        if drafter.acceptance.by_depth is not None:
            longest = min(longest, len(drafter.acceptance.by_depth))  # deeper was never measured
        yield from (TreeShape.chain(length) for length in range(1, longest + 1))
        return
    assert drafter.acceptance.by_rank is not None
    ranks = drafter.acceptance.by_rank[:MOST_CHILDREN]
    deepest = min(drafter.max_depth or DEEPEST_TREE, LEVELS[-1])
    levels = sorted({deepest, *(level for level in LEVELS if level < deepest)})
    seen: set[TreeShape] = set()
    for rows in (rows for rows in ROWS if rows <= most_rows):
        within = [level for level in levels if level < rows]
        work -= (rows * rows + 2000) * len(ranks) * sum(within)  # 2000: what numpy takes to begin
        if work < 0:
            return
        for level in within:
            shape, _ = best_shape(ranks, rows, level)
            if shape not in seen and shape.size > 1:
                seen.add(shape)
                yield shape


def _draft(acceptance: Acceptance, shape: TreeShape) -> _Draft:
    tokens, gradient = _tokens_and_gradient(acceptance, shape)
    if acceptance.samples is None:
        return _Draft(shape, tokens, None)
    return _Draft(shape, tokens, math.sqrt(max(0.0, _variance(acceptance, acceptance.samples, gradient))))


def _setting(drafter: DrafterMeasurements, draft: _Draft, passes: TargetPasses) -> Setting:
    shape = draft.shape
    draft_ms = drafter.overhead_ms + shape.depth * drafter.step_ms[passes.batch]
    step_ms = passes.ms.at(shape.size) + draft_ms
    per_token = passes.ms.one_row / step_ms  # what a token per step is worth in speedup
    error = None if draft.error is None else per_token * draft.error
    return Setting(drafter.name, drafter.kind, shape, draft.tokens, step_ms, draft.tokens * per_token, error)


def _tokens_and_gradient(acceptance: Acceptance, shape: TreeShape) -> tuple[float, NDArray[np.float64]]:
    """E[tokens] and its derivative by each measured number: by α, by the depths, or by the ranks.

    A node's probability is its parent's times one measured number a_i, and the product rule follows the path:
    ∂(r·a_i)/∂a_j = a_i·∂r/∂a_j + [i = j]·r. No division, so an acceptance of 0 needs no special case.
    """
    if acceptance.by_rank is not None:
        values, which = acceptance.by_rank[: shape.width], shape.ranks
    elif acceptance.by_depth is not None:
        values, which = acceptance.by_depth[: shape.depth], tuple(depth - 1 for depth in shape.depths)
    else:
        assert acceptance.alpha is not None
        values, which = (acceptance.alpha,), (0,) * shape.size
    reach = [1.0]
    slopes = [np.zeros(len(values))]
    for parent, index in zip(shape.parents[1:], which[1:], strict=True):
        slope = values[index] * slopes[parent]
        slope[index] += reach[parent]
        reach.append(reach[parent] * values[index])
        slopes.append(slope)
    return math.fsum(reach), np.sum(slopes, axis=0)


def _variance(acceptance: Acceptance, samples: int, gradient: NDArray[np.float64]) -> float:
    """Of E[tokens], by the delta method: gᵀ C g with g = ∂E/∂a and C the covariance of the measured numbers a.

    Half a success and half a failure are added to each count (Jeffreys): ten acceptances out of ten are not
    certainty.
    """
    if acceptance.by_rank is not None:
        # Shares of one multinomial, the rest being "no child": C = (diag(a) − a aᵀ)/n.
        values = np.asarray(acceptance.by_rank[: len(gradient)])
        shares = (values * samples + 0.5) / (samples + 0.5 * (len(acceptance.by_rank) + 1))
        return float(gradient**2 @ shares - (gradient @ shares) ** 2) / samples
    if acceptance.by_depth is not None:
        values = np.asarray(acceptance.by_depth[: len(gradient)])
        # Depth d is decided only in the chains that got there.
        decided = np.maximum(samples * np.asarray(closed_form.chain_reach(values.tolist())[:-1]), 1.0)
    else:
        assert acceptance.alpha is not None
        values, decided = np.asarray([acceptance.alpha]), np.asarray([float(samples)])
    rates = (values * decided + 0.5) / (decided + 1.0)
    return float(gradient**2 @ (rates * (1.0 - rates) / decided))


def at_batch(measurements: Measurements, batch: int) -> Measurements:
    """The measurements of one batch size. Between batch sizes nothing is interpolated."""
    batch = checks.whole("batch", batch, least=1)
    passes = tuple(measured for measured in measurements.passes if measured.batch == batch)
    if not passes:
        raise ValueError(f"batch size {batch} was not measured: choose from {list(measurements.batches)}")
    return replace(measurements, passes=passes)
