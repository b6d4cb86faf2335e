"""The levels of a tree shape that is known beforehand, as a drafter fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from forerun.core.shape import TreeShape


@dataclass(frozen=True)
class LevelPlan:
    """The nodes of one depth that have children, in a shape that is known beforehand."""

    nodes: tuple[int, ...]
    children: range
    """In the order of their parents: a node with c of them has its first c candidates."""
    width: int
    """So many candidates are looked for at every node: the most children that one of them has."""
    picks: tuple[int, ...] | None
    """For each child its place among the candidates of all nodes, `width` of each; None where it is the first places in
    their order, as in a product of widths."""
    parent_columns: tuple[int, ...]  # for each node the place of its parent in the `nodes` above
    parent_places: tuple[int, ...]  # the same among all nodes with children but the root, whose place is -1


@cache
def levels_of(shape: TreeShape) -> tuple[LevelPlan, ...]:
    """Of a shape whose nodes come breadth first, or of its beginning."""
    plans: list[LevelPlan] = []
    start = -1  # the place of the first node of the level above
    for depth in range(shape.depth):
        nodes = tuple(node for node, at in enumerate(shape.depths) if at == depth and shape.children[node])
        listed = [child for node in nodes for child in shape.children[node]]
        children = range(listed[0], listed[0] + len(listed))
        assert listed == list(children), "a shape that is filled level by level comes breadth first"
        counts = [len(shape.children[node]) for node in nodes]
        width = max(counts)
        picks = tuple(width * column + rank for column, count in enumerate(counts) for rank in range(count))
        upper = {node: column for column, node in enumerate(plans[-1].nodes)} if plans else {}
        columns = tuple(upper[shape.parents[node]] for node in nodes) if plans else ()
        places = tuple(start + column for column in columns)
        start += len(plans[-1].nodes) if plans else 0
        even = picks == tuple(range(len(children)))
        plans.append(LevelPlan(nodes, children, width, None if even else picks, columns, places))
    return tuple(plans)
