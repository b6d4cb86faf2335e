"""What a tree tells of its nodes: from the value of whole paths to the chance of a node behind its parent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree, LogValues

CHANCES = st.floats(0.001, 1.0)


@st.composite
def told_trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Parents, and for each node the chance behind its parent."""
    size = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    return parents, [1.0, *(draw(CHANCES) for _ in parents[1:])]


def values_of(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    found: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        found.append(math.log(chance) + (found[parent] if parent >= 0 else 0.0))
    return found


def telling(*values: list[float] | None) -> LogValues:
    return lambda: values


@given(forest=st.lists(told_trees(), min_size=1, max_size=3), silent=st.integers(0, 2))
def test_values_come_apart_into_chances(forest: list[tuple[list[int], list[float]]], silent: int) -> None:
    """In lists, with silent nodes behind, and in tensors, with padding."""
    values = telling(*(values_of(*tree) for tree in forest))
    listed = DraftTree.of_lists(
        [([7] * (len(parents) + silent), parents + [0] * silent) for parents, _ in forest],
        [3] * len(forest),
        [silent] * len(forest),
        values,
    )
    for tree, (_, chances) in zip(listed.confidences(), forest, strict=True):
        assert tree == pytest.approx(chances)
    size = max(len(parents) for parents, _ in forest)
    padded = torch.tensor([parents + [-1] * (size - len(parents)) for parents, _ in forest])
    padding = telling(*([*values_of(*tree), *[-math.inf] * (size - len(tree[0]))] for tree in forest))
    built = DraftTree.build(
        torch.full_like(padded, 7), padded, torch.full((len(forest),), 3), Drawing.FIXED, log_values=padding
    )
    for tree, (_, chances) in zip(built.confidences(), forest, strict=True):
        assert tree == pytest.approx(chances + [0.0] * (size - len(chances)))
        assert tree is not None
        assert all(math.isfinite(chance) for chance in tree)


def test_rounding_gives_no_chance_above_one() -> None:
    tree = DraftTree.of_lists([([1, 2], [-1, 0])], [0], log_values=telling([0.0, 1e-7]))
    assert tree.confidences() == [[1.0, 1.0]]


def test_who_does_not_know_says_so() -> None:
    trees = [([1, 2], [-1, 0]), ([3, 4], [-1, 0])]
    assert DraftTree.of_lists(trees, [0, 0]).confidences() == [None, None]
    some = DraftTree.of_lists(trees, [0, 0], log_values=telling(None, [0.0, math.log(0.5)]))
    assert some.confidences() == [None, [1.0, 0.5]]
    assert some.take(torch.tensor([1])).confidences() == [None], "a trace asks for all trees of a step"


def test_tensors_of_a_tree_of_lists_change_nothing_about_it() -> None:
    tree = DraftTree.of_lists([([1, 2], [-1, 0])], [0], log_values=telling([0.0, math.log(0.25)]))
    assert tree.tokens.tolist() == [[1, 2]]
    assert tree.confidences() == [[1.0, 0.25]]
