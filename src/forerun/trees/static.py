"""Shapes fixed before anything is drafted, as in Medusa (Cai et al., 2024).

Medusa's head d guesses the token d + 1 positions on from the root without seeing the guesses in between, so
one table of accuracies, by head and by rank, describes every node: `accuracies[d][r]` is the measured
probability that the r-th candidate of head d is the right one. A node counts when its whole path is right,
which is taken to happen with the product of the accuracies along the path.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import product

from forerun.core.shape import TreeShape


def cartesian(widths: Sequence[int]) -> TreeShape:
    """The top-s_k product tree: every node at depth d has `widths[d]` children; nodes come breadth first.

    No widths at all is the root alone, plain decoding.
    """
    for depth, width in enumerate(widths):
        if width < 1:
            raise ValueError(f"widths[{depth}] is {width}: every level needs a width of at least 1; drop the level")
    levels = [list(product(*(range(width) for width in widths[:depth]))) for depth in range(len(widths) + 1)]
    return TreeShape.from_rank_paths(path for level in levels for path in level)


def greedy(accuracies: Sequence[Sequence[float]], size: int) -> TreeShape:
    """Medusa's builder: add the node most likely to be right, until there are `size` nodes with the root.

    Ties go to the shallower node, then to the smaller rank path. Where accuracies fall with the rank the
    result has the largest expected number of tokens of all shapes of that size.

    A rank is a place among siblings, so a node can only stand in the tree beside all its elder siblings.
    Measured accuracies need not fall with the rank; a node is therefore a candidate once its parent and its
    next elder sibling are in, and never before, however good it is. It does not pull a weak elder in with it.

    A node that is never right costs a row of the target's pass and returns nothing, so zero-accuracy nodes
    are not added (nor, for the reason above, their younger siblings), even when `size` is not reached. The
    tree is smaller than `size` as well when the table has no further nodes.
    """
    _check(accuracies)
    if size < 1:
        raise ValueError(f"size is {size}: a tree has at least its root, so ask for 1 or more")

    # A heap of (-product, depth, path): the order above. A node enters it once, when it becomes a candidate.
    candidates: list[tuple[float, int, tuple[int, ...]]] = []
    products: dict[tuple[int, ...], float] = {(): 1.0}

    def offer(path: tuple[int, ...]) -> None:
        """Make the node a candidate, if the table knows it and it can be right."""
        depth, rank = len(path), path[-1]
        if depth <= len(accuracies) and rank < len(accuracies[depth - 1]):
            probability = products[path[:-1]] * accuracies[depth - 1][rank]
            if probability > 0:
                heapq.heappush(candidates, (-probability, depth, path))

    offer((0,))
    while candidates and len(products) < size:
        negated, _, path = heapq.heappop(candidates)
        products[path] = -negated
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    return TreeShape.from_rank_paths(products)


def _check(accuracies: Sequence[Sequence[float]]) -> None:
    for depth, row in enumerate(accuracies):
        for rank, accuracy in enumerate(row):
            if not 0 <= accuracy <= 1:  # also refuses NaN
                raise ValueError(f"accuracies[{depth}][{rank}] is {accuracy}: give a probability between 0 and 1")


def examples() -> list[TreeShape]:
    return [cartesian([3]), cartesian([2, 1]), greedy([[0.6, 0.2, 0.1], [0.5, 0.3], [0.4]], 6)]
