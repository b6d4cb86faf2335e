"""The best static tree for measured acceptance: the dynamic programme of Sequoia (Chen et al., 2024).

It takes one vector: a_b, the chance that the b-th child of an accepted node is the accepted one. The expected
number of tokens per pass is then the sum over the nodes of the product of a along the path, the root counting
1 for the target's own token. The best tree of m nodes, at most l draft levels and b children at the root is
the best tree with b − 1 children and y nodes, plus a b-th child that is itself the root of a best tree of
m − y nodes with one level less:

    T[1, l, 0] = 1
    T[m, l, b] = max over y of  T[y, l, b − 1] + a_b · max over b' of T[m − y, l − 1, b']

(The line T[m, l, 1] = 1 + a_1 · max T[m − 1, l − 1, ·] is the case b = 1, where only y = 1 exists.) The shape
is chosen from averages, before any token is drawn, so it suits sampled children as well as fixed ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.shape import TreeShape


@dataclass(frozen=True)
class Choice:
    """The tree to use on a machine, and what to expect from it."""

    shape: TreeShape
    expected_tokens: float  # per pass of the target
    step_time: float  # seconds: every draft level, then the target's pass
    tokens_per_second: float


def best_shape(rank_acceptance: Sequence[float], size: int, depth: int) -> tuple[TreeShape, float]:
    """The tree of at most `size` nodes (with the root) and `depth` levels that yields most, and its yield.

    Nodes come breadth first; the yield is in expected tokens per pass. Of equal yields the smallest tree is
    returned, so a rank that is never accepted is not in it unless a younger one is worth it.
    """
    programme = _Programme(rank_acceptance, size, depth)
    yields = programme.best[-1]  # of the trees with exactly 0, 1, 2, ... nodes
    nodes = int(np.argmax(yields))  # the first of equals
    return programme.shape(nodes, len(programme.best) - 1), float(yields[nodes])


def choose(
    rank_acceptance: Sequence[float],
    draft_time: float,
    verify_time: Callable[[int], float] | Mapping[int, float],
    max_size: int,
    max_depth: int,
) -> Choice:
    """The size m and depth l with the least time per token, (l · draft_time + verify_time(m)) / T[m, l].

    `draft_time` is the seconds of one draft level, `verify_time` those of a target pass over m rows. In a
    mapping of measured sizes, a size between two of them costs what the next larger one does (the pass can be
    padded to it) and sizes beyond the last are not considered. No speculation (m = 1, l = 0) competes like
    any other tree, and of equally fast trees the shallower, then the smaller wins.
    """
    programme = _Programme(rank_acceptance, max_size, max_depth)
    if not (draft_time >= 0 and math.isfinite(draft_time)):
        raise ValueError(f"draft_time is {draft_time}: give the seconds of one draft level, 0 or more")
    verify_times = _verify_times(verify_time, programme.size)  # by number of nodes; index 0 unused

    best = (math.inf, 0, 1)  # time per token, depth, nodes
    for depth, yields in enumerate(programme.best):
        for nodes in range(1, programme.size + 1):
            if yields[nodes] > 0:  # -inf: no such tree
                per_token = (depth * draft_time + verify_times[nodes]) / float(yields[nodes])
                best = min(best, (per_token, depth, nodes))
    _, depth, nodes = best
    tokens, step_time = float(programme.best[depth][nodes]), depth * draft_time + verify_times[nodes]
    return Choice(programme.shape(nodes, depth), tokens, step_time, tokens / step_time)


class _Programme:
    """The table T for every size, depth and number of children, with the way back from values to trees.

    Per level it keeps `best[l][m]` = max over b of T[m, l, b] (−inf where there is no such tree), the b that
    gave it, and per (b, m) the y that gave T[m, l, b].
    """

    def __init__(self, rank_acceptance: Sequence[float], size: int, depth: int) -> None:
        _check(rank_acceptance, size, depth)
        self.size = size
        ranks = rank_acceptance[: size - 1]  # a root has at most size − 1 children
        alone = np.full(size + 1, -np.inf)  # T[m, l, 0]: a root without children
        alone[1] = 1.0
        self.best: list[NDArray[np.float64]] = [alone]
        self._children: list[NDArray[np.intp]] = [np.zeros(size + 1, dtype=np.intp)]
        self._split: list[NDArray[np.intp]] = [np.zeros((1, size + 1), dtype=np.intp)]

        nodes = np.arange(size + 1)
        rest = nodes[:, None] - nodes[None, :]  # [m, y]: the m − y nodes of the b-th child; where < 1 there is none
        for _ in range(min(depth, size - 1)):  # deeper than a chain of all nodes there is nothing
            below = self.best[-1]
            table = [alone]  # T[·, l, b] for b = 0, 1, ...
            split = [np.zeros(size + 1, dtype=np.intp)]
            for acceptance in ranks:
                child = np.full(size + 1, -np.inf)
                np.multiply(acceptance, below, out=child, where=np.isfinite(below))  # 0 · −inf must stay −inf
                options = table[-1][None, :] + np.where(rest >= 1, child[rest], -np.inf)  # [m, y]
                split.append(options.argmax(axis=1))
                table.append(options.max(axis=1))
            values = np.stack(table)  # [b, m]
            self.best.append(values.max(axis=0))
            self._children.append(values.argmax(axis=0))
            self._split.append(np.stack(split))

    def shape(self, nodes: int, depth: int) -> TreeShape:
        """The tree behind `best[depth][nodes]`, breadth first."""
        paths: list[tuple[int, ...]] = []
        unfinished: list[tuple[tuple[int, ...], int, int]] = [((), nodes, depth)]  # path, nodes, levels below
        while unfinished:
            path, m, level = unfinished.pop()
            paths.append(path)
            for b in range(int(self._children[level][m]), 0, -1):  # the b-th child has rank b − 1
                y = int(self._split[level][b, m])
                unfinished.append(((*path, b - 1), m - y, level - 1))
                m = y  # what is left for the elder children
        return TreeShape.from_rank_paths(paths)


def _verify_times(verify_time: Callable[[int], float] | Mapping[int, float], size: int) -> list[float]:
    """Seconds of the target's pass by number of nodes up to `size`; +inf where a size is not considered."""
    times = [math.inf]
    for nodes in range(1, size + 1):
        if isinstance(verify_time, Mapping):
            if 1 not in verify_time:
                raise ValueError("verify_time has no entry for 1 node: measure plain decoding, the tree of one node")
            measured = min((m for m in verify_time if m >= nodes), default=None)
            if measured is None:
                times.append(math.inf)
                continue
            time = verify_time[measured]
        else:
            time = verify_time(nodes)
        if not (time > 0 and math.isfinite(time)):
            raise ValueError(f"verify_time of {nodes} nodes is {time}: give the seconds of the pass, more than 0")
        times.append(float(time))
    return times


def _check(rank_acceptance: Sequence[float], size: int, depth: int) -> None:
    if len(rank_acceptance) == 0:
        raise ValueError("rank_acceptance is empty: measure the acceptance of at least the first child")
    for rank, acceptance in enumerate(rank_acceptance):
        if not 0 <= acceptance <= 1:  # also refuses NaN
            raise ValueError(f"rank_acceptance[{rank}] is {acceptance}: give a probability between 0 and 1")
    if math.fsum(rank_acceptance) > 1 + 1e-9:
        raise ValueError(
            f"rank_acceptance sums to {math.fsum(rank_acceptance)}: at most one child is accepted, so give "
            "each rank's share of all visits to a node, not of the visits that reached that rank"
        )
    if size < 1:
        raise ValueError(f"the size is {size}: a tree has at least its root, so allow 1 or more")
    if depth < 0:
        raise ValueError(f"the depth is {depth}: give the number of draft levels, 0 for none")


def examples() -> list[TreeShape]:
    acceptance = [0.6, 0.2, 0.1]
    times = {1: 1.0, 4: 1.1, 8: 3.0}
    return [
        best_shape(acceptance, 5, 3)[0],
        best_shape(acceptance, 6, 2)[0],
        choose(acceptance, 0.1, times, max_size=8, max_depth=3).shape,
    ]
