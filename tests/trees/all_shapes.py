"""Every tree there is, for the builders that claim to find the best one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from forerun.core.shape import TreeShape


@cache
def forests(nodes: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """All ordered forests of so many nodes, each as the rank paths of its nodes under a common root."""
    if nodes == 0:
        return ((),)
    found: list[tuple[tuple[int, ...], ...]] = []
    for first in range(1, nodes + 1):  # nodes of the eldest tree
        for below in forests(first - 1):
            for younger in forests(nodes - first):
                eldest = ((0,), *((0, *path) for path in below))
                found.append((*eldest, *((path[0] + 1, *path[1:]) for path in younger)))
    return tuple(found)


def shapes_of(nodes: int) -> list[TreeShape]:
    """All shapes with exactly so many nodes, the root included: a Catalan number of them."""
    return [TreeShape.from_rank_paths(forest) for forest in forests(nodes - 1)]


def shapes_up_to(nodes: int) -> list[TreeShape]:
    return [shape for count in range(1, nodes + 1) for shape in shapes_of(count)]


def expected_tokens(shape: TreeShape, accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens per pass: 1 for the target's own token plus, per drafted node, the chance that its path is right."""
    chances = [1.0]
    for parent, depth, rank in zip(shape.parents[1:], shape.depths[1:], shape.ranks[1:], strict=True):
        chances.append(chances[parent] * accuracies[depth - 1][rank])
    return sum(chances)
