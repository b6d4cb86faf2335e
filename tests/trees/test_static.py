from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.trees.static import cartesian, greedy
from tests.trees.all_shapes import expected_tokens, shapes_up_to

coarse = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])
tables = st.lists(st.lists(coarse, max_size=4), max_size=4)


@given(st.lists(st.integers(1, 3), max_size=4))
def test_cartesian_counts(widths: list[int]) -> None:
    shape = cartesian(widths)
    assert shape.size == sum(math.prod(widths[:depth]) for depth in range(len(widths) + 1))
    assert list(shape.depths) == sorted(shape.depths)  # breadth first
    for node, children in enumerate(shape.children):
        depth = shape.depths[node]
        assert len(children) == (widths[depth] if depth < len(widths) else 0)


def test_cartesian_by_hand() -> None:
    assert cartesian([2, 3]).parents == (-1, 0, 0, 1, 1, 1, 2, 2, 2)
    assert cartesian([]).parents == (-1,)


@pytest.mark.parametrize("widths", [[0], [2, 0], [-1], [0, 3]])
def test_cartesian_refuses_an_empty_level(widths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cartesian(widths)


@settings(deadline=None)
@given(tables, st.integers(1, 7))
def test_greedy_finds_the_best_shape_when_accuracies_fall_with_rank(table: list[list[float]], size: int) -> None:
    table = [sorted(row, reverse=True) for row in table]
    built = greedy(table, size)
    possible = [
        shape
        for shape in shapes_up_to(size)
        if shape.depth <= len(table)
        and all(rank < len(table[d - 1]) for d, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True))
    ]
    best = max(expected_tokens(shape, table) for shape in possible)
    assert expected_tokens(built, table) == pytest.approx(best, abs=1e-12)
    assert built.size <= size


def plain_greedy(table: list[list[float]], size: int) -> list[tuple[int, ...]]:
    """Rescan all that could be added at each step; returns the paths in the order they were added."""
    added: list[tuple[int, ...]] = []
    tree: set[tuple[int, ...]] = {()}
    while len(tree) < size:
        options: list[tuple[float, int, tuple[int, ...]]] = []
        for parent in tree:
            rank = sum(path[:-1] == parent for path in tree if path)  # the next child that is missing
            if len(parent) < len(table) and rank < len(table[len(parent)]):
                path = (*parent, rank)
                value = math.prod(table[depth][r] for depth, r in enumerate(path))
                options.append((-value, len(path), path))
        if not options or -min(options)[0] == 0:
            break
        tree.add(min(options)[2])
        added.append(min(options)[2])
    return added


@settings(max_examples=300, deadline=None)
@given(tables, st.integers(1, 12))
def test_greedy_equals_a_rescan_for_any_table_and_ties(table: list[list[float]], size: int) -> None:
    assert set(greedy(table, size).rank_paths) == {(), *plain_greedy(table, size)}


@given(tables, st.integers(1, 10))
def test_greedy_trees_are_nested_and_never_hold_a_useless_node(table: list[list[float]], size: int) -> None:
    smaller, larger = greedy(table, size), greedy(table, size + 1)
    assert set(smaller.rank_paths) <= set(larger.rank_paths)
    for path in larger.rank_paths:
        assert all(table[depth][rank] > 0 for depth, rank in enumerate(path))


def test_ties_go_to_the_shallower_then_to_the_smaller_path() -> None:
    assert greedy([[0.5, 0.25], [0.5, 0.25]], 3).rank_paths == ((), (0,), (1,))  # (1,) and (0, 0) tie at 0.25
    assert greedy([[0.5, 0.5], [0.5]], 4).rank_paths == ((), (0,), (1,), (0, 0))  # (0, 0) and (1, 0)


def test_a_better_younger_sibling_waits_for_its_elder() -> None:
    table = [[0.5, 0.1, 0.4], [0.3]]
    assert greedy(table, 2).rank_paths == ((), (0,))
    assert greedy(table, 3).rank_paths == ((), (0,), (0, 0))  # 0.15 against 0.1, though 0.4 stands behind it
    assert greedy(table, 5).rank_paths == ((), (0,), (1,), (2,), (0, 0))


def test_zero_accuracy_ends_the_siblings() -> None:
    assert greedy([[0.5, 0.0, 0.4], [0.0]], 10).rank_paths == ((), (0,))
    assert greedy([[0.0]], 10).size == 1
    assert greedy([], 10).size == 1


def test_bad_values_are_refused() -> None:
    for accuracy in [-0.1, 1.1, math.nan]:
        with pytest.raises(ValueError, match=r"accuracies\[1\]\[0\]"):
            greedy([[0.5], [accuracy]], 3)
    with pytest.raises(ValueError, match="size is 0"):
        greedy([[0.5]], 0)
