from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.drafters.drafter import Budget
from forerun.drafters.trained_folder import Calibration
from forerun.drafters.tree_spec import TreeSpec, _over_depths
from forerun.trees.optimal import best_shape
from forerun.trees.static import cartesian, greedy


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
        ("static:26", "static:26", Drawing.FIXED, 26, 26, True),
        ("static:100", "static:100", Drawing.FIXED, 100, 64, True),
        ("sequoia:26,6", "sequoia:26,6", Drawing.WITHOUT_REPLACEMENT, 26, 6, True),
    ],
)
def test_notation(text: str, canonical: str, drawing: Drawing, size: int, depth: int, branches: bool) -> None:
    spec = TreeSpec.parse(text)
    assert str(spec) == canonical
    assert TreeSpec.parse(canonical) == spec
    assert (spec.drawing, spec.size, spec.depth, spec.branches) == (drawing, size, depth, branches)
    if not spec.dynamic and not spec.needs_measurement:
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
        ("static:3,2", "has 2 numbers: write"),
        ("sequoia:3", "has 1 numbers: write.*sequoia:26,6"),
        ("static:257", "too large: at most 256"),
        ("sequoia:257,6", "too large: at most 256"),
        ("sequoia:26,65", "is 65 deep: at most 64"),
        ("sequoia:26,0", "a number below 1"),
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


ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.1], [0.3, 0.1, 0.05, 0.01]]


def test_a_static_tree_holds_what_was_most_often_right() -> None:
    spec = TreeSpec.parse("static:7")
    assert spec.needs_measurement
    with pytest.raises(AssertionError, match="ask `measured` first"):
        _ = spec.shape
    measured = spec.measured(ACCURACIES)
    assert not measured.needs_measurement
    assert measured.shape == greedy(ACCURACIES, 8)
    # In the order they are added: 0.5, 0.2 and 0.2, 0.1, 0.08, 0.06, 0.05.
    assert measured.shape.rank_paths == ((), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert (measured.size, measured.depth, measured.width, measured.branches) == (7, 3, 3, True)
    assert str(measured) == "static:7"
    assert measured.measured(ACCURACIES) == measured
    assert TreeSpec.parse("static:9").measured([[0.5], [0.5]]).size == 2  # there are no more
    assert not TreeSpec.parse("static:9").measured([[0.5], [0.5]]).branches


def test_a_sequoia_tree_goes_by_acceptance_over_all_visits() -> None:
    """Of 1000 roots 800 have an accepted child, and 400 of those one: by rank 500 + 320 + 120 of 2200 visits, ..."""
    ranks = _over_depths(ACCURACIES)
    assert ranks == pytest.approx([(500 + 320 + 120) / 2200, (200 + 80 + 40) / 2200, (100 + 20) / 2200, 4 / 2200])
    measured = TreeSpec.parse("sequoia:9,3").measured(ACCURACIES)
    assert measured.shape == best_shape(ranks, 10, 3)[0]
    assert measured.shape != best_shape(ACCURACIES[0], 10, 3)[0], "or the choice would not show"
    assert measured.drawing is Drawing.WITHOUT_REPLACEMENT
    # Depths that the tree does not have do not count.
    assert TreeSpec.parse("sequoia:9,1").measured(ACCURACIES).shape == best_shape(ACCURACIES[0], 10, 1)[0]


@pytest.mark.parametrize("tree", ["static:5", "sequoia:5,3"])
@pytest.mark.parametrize("accuracies", [[], [[]], [[0.0, 0.0], [0.5]]])
def test_nothing_is_made_of_a_measurement_without_success(tree: str, accuracies: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r'measure again, or name a shape, as in "fixed:3,2,1"'):
        TreeSpec.parse(tree).measured(accuracies)


@pytest.mark.parametrize("tree", ["5", "3,2", "fixed:3,2", "dynamic:2,2,5"])
def test_other_trees_need_no_measurement(tree: str) -> None:
    spec = TreeSpec.parse(tree)
    assert not spec.needs_measurement
    assert spec.measured([[1.0]]) is spec


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


def test_what_a_calibration_expects_of_trees() -> None:
    measured = Calibration(accuracies=((0.6, 0.2), (0.5, 0.1)))
    assert measured.gains(TreeSpec.parse("dynamic:2,2,5")) == pytest.approx((0.0, 0.6, 0.9, 1.1, 1.2, 1.26))
    whole = measured.gains(TreeSpec.parse("dynamic:3,4,8"))
    assert whole == pytest.approx((0.0, 0.6, 0.9, 1.1, 1.2, 1.26, 1.28, 1.28, 1.28))
    assert measured.gains(TreeSpec.parse("3")) == pytest.approx((0.0, 0.6, 0.9, 0.9))
    for nothing in ((), ((),), ((0.0, 0.5),)):
        assert Calibration(accuracies=nothing).gains(TreeSpec.parse("3")) == ()
