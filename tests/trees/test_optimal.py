from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.shape import TreeShape
from forerun.trees.optimal import best_shape, choose
from tests.trees.all_shapes import expected_tokens, shapes_up_to

# Ranks in any order (acceptance need not fall with the rank), zeros and ties included, sum at most 1.
acceptances = st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=4).map(
    lambda weights: [weight / max(10, sum(weights)) for weight in weights]
)


def tokens(shape: TreeShape, acceptance: list[float]) -> float:
    return expected_tokens(shape, [acceptance] * shape.depth)


def possible(acceptance: list[float], size: int, depth: int) -> list[TreeShape]:
    return [s for s in shapes_up_to(size) if s.depth <= depth and s.width <= len(acceptance)]


@settings(max_examples=200, deadline=None)
@given(acceptances, st.integers(1, 7), st.integers(0, 7))
def test_no_shape_beats_it(acceptance: list[float], size: int, depth: int) -> None:
    shape, value = best_shape(acceptance, size, depth)
    shapes = possible(acceptance, size, depth)
    best = max(tokens(other, acceptance) for other in shapes)
    assert value == pytest.approx(best, abs=1e-12)
    assert value == pytest.approx(tokens(shape, acceptance), abs=1e-12)
    assert shape.size <= size
    assert shape.depth <= depth
    assert shape.width <= len(acceptance)
    assert shape == TreeShape.from_rank_paths(shape.rank_paths)  # breadth first


@given(acceptances, st.integers(1, 20), st.integers(0, 6))
def test_more_room_never_hurts(acceptance: list[float], size: int, depth: int) -> None:
    value = best_shape(acceptance, size, depth)[1]
    assert best_shape(acceptance, size + 1, depth)[1] >= value
    assert best_shape(acceptance, size, depth + 1)[1] >= value


def test_known_trees() -> None:
    assert best_shape([0.7], 5, 10)[0] == TreeShape.chain(4)  # one rank: a chain, and its closed form
    assert best_shape([0.7], 5, 10)[1] == pytest.approx(2.7731, abs=1e-4)
    assert best_shape([0.9, 0.05], 4, 10)[0] == TreeShape.chain(3)  # a sure drafter goes deep,
    assert best_shape([0.35, 0.33, 0.32], 4, 10)[0].parents == (-1, 0, 0, 0)  # a doubtful one wide
    assert best_shape([0.5, 0.3], 64, 0) == (TreeShape.chain(0), 1.0)
    assert best_shape([0.5, 0.3], 64, 1)[0] == TreeShape((-1, 0, 0))  # all there is


def test_useless_nodes_are_left_out() -> None:
    assert best_shape([0.0, 0.0], 5, 3) == (TreeShape.chain(0), 1.0)
    assert best_shape([0.5, 0.0], 10, 2)[0] == TreeShape.chain(2)
    assert best_shape([0.0, 0.5], 3, 1)[0].parents == (-1, 0, 0)  # the elder is needed for the younger's rank


def test_large_trees_are_quick() -> None:
    acceptance = [0.5 / 2**rank for rank in range(16)]
    start = time.process_time()
    shape, value = best_shape(acceptance, 128, 10)
    assert time.process_time() - start < 2
    assert shape.size == 128
    assert value == pytest.approx(tokens(shape, acceptance), abs=1e-9)


verify_times: list[Callable[[int], float] | Mapping[int, float]] = [
    lambda m: 1 + 0.05 * m,
    lambda m: 0.5 * m,
    lambda m: 1.0 + (m > 4),  # a step, as where a kernel's tile is full
    lambda m: 1 + 1 / m,  # falling: every node is worth having
    {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.5},
    {1: 1.0, 3: 1.05, 5: 2.0},
]


@settings(max_examples=100, deadline=None)
@given(
    acceptances,
    st.sampled_from([0.0, 0.05, 0.3, 2.0]),
    st.sampled_from(verify_times),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_choose_against_all_shapes(
    acceptance: list[float],
    draft_time: float,
    verify_time: Callable[[int], float] | Mapping[int, float],
    size: int,
    depth: int,
) -> None:
    def step_time(shape: TreeShape) -> float:
        if isinstance(verify_time, Mapping):
            larger = [m for m in verify_time if m >= shape.size]
            return shape.depth * draft_time + (verify_time[min(larger)] if larger else math.inf)
        return shape.depth * draft_time + verify_time(shape.size)

    choice = choose(acceptance, draft_time, verify_time, size, depth)
    shapes = possible(acceptance, size, depth)
    fastest = max(tokens(shape, acceptance) / step_time(shape) for shape in shapes)
    assert choice.tokens_per_second == pytest.approx(fastest, rel=1e-12)
    assert choice.expected_tokens == pytest.approx(tokens(choice.shape, acceptance), rel=1e-12)
    assert choice.step_time == pytest.approx(step_time(choice.shape), rel=1e-12)
    assert choice.shape in shapes


def test_choose_may_decline_to_speculate() -> None:
    choice = choose([0.3], draft_time=1.0, verify_time=lambda m: 1.0, max_size=8, max_depth=4)
    assert choice.shape == TreeShape.chain(0)
    assert (choice.expected_tokens, choice.step_time, choice.tokens_per_second) == (1.0, 1.0, 1.0)
    assert choose([0.3], 0.01, lambda m: 1.0, 8, 4).shape.size > 1
    # Nothing to gain and nothing to pay: the smallest tree.
    assert choose([0.0], 0.0, lambda m: 1.0, 8, 4).shape == TreeShape.chain(0)


@pytest.mark.parametrize(
    ("acceptance", "size", "depth", "message"),
    [
        ([], 4, 2, "empty"),
        ([-0.1], 4, 2, r"rank_acceptance\[0\]"),
        ([0.5, 1.1], 4, 2, r"rank_acceptance\[1\]"),
        ([0.5, math.nan], 4, 2, r"rank_acceptance\[1\]"),
        ([0.6, 0.5], 4, 2, "sums to"),
        ([0.5], 0, 2, "the size is 0"),
        ([0.5], 4, -1, "the depth is -1"),
    ],
)
def test_bad_values_are_refused(acceptance: list[float], size: int, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_shape(acceptance, size, depth)
    with pytest.raises(ValueError, match=message):
        choose(acceptance, 0.1, lambda m: 1.0, size, depth)


def test_a_sum_of_one_may_be_off_by_rounding() -> None:
    assert best_shape([0.1] * 10, 11, 1)[1] == pytest.approx(2.0)


def test_bad_times_are_refused() -> None:
    for bad in [-1.0, math.nan, math.inf]:
        with pytest.raises(ValueError, match="draft_time"):
            choose([0.5], bad, lambda m: 1.0, 4, 2)
        with pytest.raises(ValueError, match="verify_time of 1 nodes"):
            choose([0.5], 0.1, {1: bad}, 4, 2)
    with pytest.raises(ValueError, match="measure plain decoding"):
        choose([0.5], 0.1, {2: 1.0, 4: 1.0}, 4, 2)
