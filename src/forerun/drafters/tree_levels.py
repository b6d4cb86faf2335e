"""The levels of a tree shape that is known beforehand, as a draft model fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from forerun.core.shape import TreeShape


@dataclass(frozen=True)
class LevelPlan:
    """The nodes of one depth that have children, in a shape that is known beforehand."""

    nodes: range
    children: range
    """In the order of their parents. All nodes have `width` of them but the last, where a cut may have left fewer."""
    width: int
    parent_columns: list[int]  # for each node the place of its parent in the `nodes` above
    parent_places: list[int]  # the same among all nodes with children but the root, whose place is -1


@cache
def levels_of(shape: TreeShape) -> tuple[LevelPlan, ...]:
    """Of a chain, or of a product of widths that was cut."""
    plans: list[LevelPlan] = []
    start = -1  # the place of the first node of the level above
    for depth in range(shape.depth):
        level = [node for node, at in enumerate(shape.depths) if at == depth and shape.children[node]]
        nodes = range(level[0], level[-1] + 1)
        children = range(shape.children[nodes[0]][0], shape.children[nodes[-1]][-1] + 1)
        columns = [plans[-1].nodes.index(shape.parents[node]) for node in nodes] if plans else []
        places = [start + column for column in columns]
        start += len(plans[-1].nodes) if plans else 0
        plans.append(LevelPlan(nodes, children, len(shape.children[nodes[0]]), columns, places))
    return tuple(plans)
