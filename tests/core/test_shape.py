"""Tree shapes against brute force, and what is no tree."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.shape import TreeShape


@st.composite
def parent_tuples(draw: st.DrawFn, largest: int = 12) -> tuple[int, ...]:
    size = draw(st.integers(1, largest))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))


def lineage(parents: tuple[int, ...], node: int) -> list[int]:
    """From the root down to the node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@settings(max_examples=150, deadline=None)
@given(parent_tuples())
def test_everything_about_a_shape_equals_brute_force(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents)
    nodes = range(len(parents))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    assert shape.size == len(parents)
    assert shape.children == tuple(map(tuple, children))
    assert shape.width == max(map(len, children))
    assert shape.depths == tuple(len(lineage(parents, node)) - 1 for node in nodes)
    assert shape.depth == max(shape.depths)
    assert shape.is_chain == all(len(siblings) <= 1 for siblings in children)
    ranks = [children[parents[node]].index(node) if node else 0 for node in nodes]
    assert shape.ranks == tuple(ranks)
    assert shape.rank_paths == tuple(tuple(ranks[step] for step in lineage(parents, node)[1:]) for node in nodes)


@settings(max_examples=150, deadline=None)
@given(parent_tuples(), st.randoms(use_true_random=False))
def test_rank_paths_come_back_breadth_first(parents: tuple[int, ...], random: Random) -> None:
    shape = TreeShape(parents)
    paths = list(shape.rank_paths)
    random.shuffle(paths)
    again = TreeShape.from_rank_paths(paths)
    assert again.rank_paths == tuple(sorted(shape.rank_paths, key=lambda path: (len(path), path)))
    assert TreeShape.from_rank_paths(again.rank_paths) == again


def test_rank_paths_by_hand() -> None:
    shape = TreeShape.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert shape.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert TreeShape.from_rank_paths([]) == TreeShape((-1,))
    assert TreeShape.from_rank_paths([(0,), (0,), ()]) == TreeShape((-1, 0))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_chain(length: int) -> None:
    shape = TreeShape.chain(length)
    assert shape.parents == tuple(range(-1, length))
    assert shape.is_chain
    assert (shape.size, shape.depth, shape.width) == (length + 1, length, min(length, 1))


def test_two_branches_are_no_chain() -> None:
    assert not TreeShape((-1, 0, 0)).is_chain


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "starts with its root"),
        ((0,), "starts with its root"),
        ((1, -1), "starts with its root"),
        ((-1, -1), "node 1 has parent -1"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 2, 1), "node 1 has parent 2"),  # a cycle
        ((-1, 2, 0), "node 1 has parent 2"),  # a parent after its child
        ((-1, 0, 5), "node 2 has parent 5"),
        ((-1, 0, -2), "node 2 has parent -2"),
    ],
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(parents)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0, 0)], r"path \(0, 0\) has no parent: add \(0,\)"),
        ([(1,)], r"path \(1,\) has no elder sibling: add \(0,\)"),
        ([(0,), (0, 2), (0, 0)], r"path \(0, 2\) has no elder sibling: add \(0, 1\)"),
        ([(-1,)], r"path \(-1,\)"),
    ],
)
def test_rank_paths_with_gaps_are_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.from_rank_paths(paths)


def test_negative_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 drafted tokens"):
        TreeShape.chain(-1)
