from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.drafters.drafter import Budget
from forerun.drafters.tree_spec import TreeSpec
from forerun.trees.static import cartesian


@pytest.mark.parametrize(
    ("text", "canonical", "drawing", "size", "depth", "branches"),
    [
        ("5", "chain:5", Drawing.IID, 5, 5, False),
        ("chain:5", "chain:5", Drawing.IID, 5, 5, False),
        (" 3, 2,1 ", "sampled:3,2,1", Drawing.WITHOUT_REPLACEMENT, 15, 3, True),
        ("sampled:4", "sampled:4", Drawing.WITHOUT_REPLACEMENT, 4, 1, True),
        ("fixed:3,2,1", "fixed:3,2,1", Drawing.FIXED, 15, 3, True),
        ("fixed:1,1", "fixed:1,1", Drawing.FIXED, 2, 2, False),
        ("dynamic:8,5,40", "dynamic:8,5,40", Drawing.FIXED, 40, 5, True),
        ("dynamic:2,2,50", "dynamic:2,2,50", Drawing.FIXED, 6, 2, True),  # more than 2 + 4 never grow
        ("dynamic:1,4,4", "dynamic:1,4,4", Drawing.FIXED, 4, 4, False),
    ],
)
def test_notation(text: str, canonical: str, drawing: Drawing, size: int, depth: int, branches: bool) -> None:
    spec = TreeSpec.parse(text)
    assert str(spec) == canonical
    assert TreeSpec.parse(canonical) == spec
    assert (spec.drawing, spec.size, spec.depth, spec.branches) == (drawing, size, depth, branches)
    if not spec.dynamic:
        assert (spec.shape.size - 1, spec.shape.depth, spec.shape.width) == (size, depth, spec.width)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not understood: write a chain as"),
        ("a", "not understood"),
        ("3,,1", "not understood"),
        ("3,-1", "not understood"),
        ("٣", "not understood"),
        ("chain:", "not understood"),
        ("wide:3", "no tree of kind 'wide': write"),
        (":3", "no tree of kind '': write"),
        ("chain:3,2", "has 2 numbers: write"),
        ("dynamic:3,2", "has 2 numbers: write"),
        ("0", "a number below 1: for no drafts at all use the drafter none"),
        ("65", "is 65 deep: at most 64"),
        ("fixed:20,20", "too large: at most 256"),
        ("dynamic:8,5,300", "too large: at most 256"),
        ("dynamic:65,5,70", "grows from 65 nodes a level: at most 64"),
        ("dynamic:8,5,6", "keeps 6 nodes: keep at least as many as its width and its depth"),
        ("999999999999999999999999,9", "too large"),
    ],
)
def test_refusals_name_the_fix(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TreeSpec.parse(text)


@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    nodes=st.integers(0, 130),
    depth=st.integers(0, 6),
)
def test_a_cut_is_the_largest_beginning_that_fits(widths: list[int], nodes: int, depth: int) -> None:
    spec = TreeSpec("fixed", tuple(widths))
    whole, cut = cartesian(widths), spec.cut(Budget(nodes, depth))
    assert cut.parents == whole.parents[: cut.size]
    assert cut.size - 1 <= nodes
    assert cut.depth <= depth
    if cut.size < whole.size:  # one more would not fit
        assert cut.size == 1 + nodes or whole.depths[cut.size] > depth
    for node in range(1, cut.size):  # elder siblings are there, with the same ranks
        assert cut.ranks[node] == whole.ranks[node]
