"""The closed forms against figures worked out by hand, exact fractions, and counting every outcome."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.shape import TreeShape
from forerun.theory.closed_form import (
    acceptance,
    accepted_drafts,
    best_gamma,
    distribution,
    expected_tokens,
    expected_tokens_by_depth,
    expected_tokens_of_tree,
    speedup,
    tree_reach,
)

CHECKS = [
    (0.7, 1, 1.70),
    (0.7, 4, 2.7731),
    (0.7, 5, 2.9412),
    (0.7, 6, 3.0588),
    (0.9, 4, 4.0951),
    (0.5, 4, 1.9375),
    (0.95, 8, 7.3950),
]
probabilities = st.floats(0.0, 1.0)


@pytest.mark.parametrize(("alpha", "gamma", "tokens"), CHECKS)
def test_tokens_per_step_are_the_known_ones(alpha: float, gamma: int, tokens: float) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=5e-5)


@pytest.mark.parametrize(("alpha", "gamma", "gain"), [(0.7, 4, 1.98), (0.95, 8, 4.11)])
def test_speedups_are_the_known_ones(alpha: float, gamma: int, gain: float) -> None:
    assert speedup(alpha, gamma, draft_cost=0.1) == pytest.approx(gain, abs=5e-3)


def test_misprints_are_not_reproduced() -> None:
    assert abs(expected_tokens(0.7, 4) - 2.85) > 0.05
    assert abs(expected_tokens(0.7, 6) - 2.94) > 0.1
    alpha, gamma = 0.7, 4
    assert abs(expected_tokens(alpha, gamma) - alpha * (1 - alpha ** (gamma + 1)) / (1 - alpha)) > 0.5
    assert abs(expected_tokens(alpha, gamma) - (1 + (1 - alpha**gamma) / (1 - alpha))) > 0.5


@given(numerator=st.integers(0, 1000), gamma=st.integers(0, 40))
def test_tokens_equal_the_exact_sum_of_powers(numerator: int, gamma: int) -> None:
    alpha = Fraction(numerator, 1000)
    exact = sum((alpha**i for i in range(gamma + 1)), Fraction(0))
    # The float nearest to α is not α itself, hence a tolerance and no equality.
    assert expected_tokens(float(alpha), gamma) == pytest.approx(float(exact), rel=1e-12)
    assert accepted_drafts(float(alpha), gamma) == pytest.approx(float(exact - 1), rel=1e-12)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12, 2**-53])
def test_tokens_keep_their_digits_near_certainty(gap: float) -> None:
    alpha = Fraction(1.0 - gap)
    exact = sum((alpha**i for i in range(9)), Fraction(0))
    assert expected_tokens(1.0 - gap, 8) == pytest.approx(float(exact), rel=1e-15 * 8)


def test_limits() -> None:
    assert expected_tokens(1.0, 7) == 8.0
    assert expected_tokens(0.0, 7) == 1.0
    assert expected_tokens(0.7, 0) == 1.0
    assert accepted_drafts(0.7, 0) == 0.0


@settings(deadline=None)
@given(
    alpha=probabilities,
    cost=st.floats(0.0, 2.0),
    verify=st.floats(0.5, 3.0),
    longest=st.integers(0, 24),
)
def test_best_gamma_is_that_of_trying_all(alpha: float, cost: float, verify: float, longest: int) -> None:
    by_hand = [1.0]
    for gamma in range(1, longest + 1):
        by_hand.append(sum(alpha**i for i in range(gamma + 1)) / (verify + gamma * cost))
    best = best_gamma(alpha, cost, verify, longest)
    assert by_hand[best] == pytest.approx(max(by_hand), rel=1e-11)
    assert all(value < by_hand[best] * (1 + 1e-11) for value in by_hand)
    assert all(value < by_hand[best] for value in by_hand[:best])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.7, 0.9])
def test_one_draft_breaks_even_where_it_costs_its_acceptance(alpha: float) -> None:
    # (1 + α)/(1 + c) > 1 exactly when c < α; equality is a tie, and ties go to not speculating.
    assert best_gamma(alpha, draft_cost=alpha) == 0
    assert best_gamma(alpha, draft_cost=alpha * 0.999) > 0


def test_free_drafts_that_are_always_right_are_wanted_without_end() -> None:
    assert best_gamma(1.0, 0.0, max_gamma=17) == 17
    assert best_gamma(0.0, 0.0, max_gamma=17) == 0


def test_measured_verification_cost() -> None:
    cost_by_rows = {2: 1.2, 4: 1.6, 8: 4.0}
    assert speedup(0.8, 1, 0.0, cost_by_rows) == pytest.approx(1.8 / 1.2)
    assert speedup(0.8, 2, 0.1, cost_by_rows) == pytest.approx(2.44 / (1.4 + 0.2))  # halfway from 2 to 4 rows
    gains = [speedup(0.8, gamma, 0.1, cost_by_rows) for gamma in range(8)]
    assert best_gamma(0.8, 0.1, cost_by_rows) == gains.index(max(gains))
    assert best_gamma(1.0, 0.0, {2: 1.0, 4: 1.0}) == 3  # beyond 4 rows nothing was measured
    with pytest.raises(ValueError, match="stay within 8"):
        speedup(0.8, 8, 0.1, cost_by_rows)


def test_a_larger_pass_is_never_taken_to_be_cheaper() -> None:
    noisy = {2: 1.5, 4: 1.3, 8: 2.0}
    assert speedup(0.5, 3, 0.0, noisy) == pytest.approx(expected_tokens(0.5, 3) / 1.5)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_acceptance_of_two_laws(kind: Callable[[list[list[float]]], torch.Tensor]) -> None:
    p = [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]
    q = [[0.2, 0.3, 0.5], [0.0, 0.5, 0.5], [0.25, 0.25, 0.5]]
    shared = acceptance(kind(p), kind(q))
    assert shared == pytest.approx([0.7, 0.0, 1.0])
    variation = 0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum(axis=1)
    assert shared == pytest.approx(1.0 - variation)


def test_acceptance_reads_tensors_numpy_cannot() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.bfloat16)
    q = torch.tensor([0.25, 0.75], requires_grad=True)
    assert float(acceptance(p, q)) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("p", "q", "fix"),
    [
        ([0.5, 0.5], [0.5, 0.25, 0.25], "same rows and tokens"),
        ([2.0, -1.0], [0.5, 0.5], "probabilities, not logits"),
        ([0.5, math.nan], [0.5, 0.5], "non-finite"),
        ([0.5, 0.4], [0.5, 0.5], "normalise"),
        (0.5, 0.5, "rows over the vocabulary"),
    ],
)
def test_laws_that_are_none_are_refused(p: object, q: object, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        acceptance(np.asarray(p), np.asarray(q))


@given(st.lists(probabilities, max_size=6))
def test_chain_by_depth_counts_every_outcome(by_depth: list[float]) -> None:
    # The k-th draft is decided by its own coin; the step ends at the first tails.
    expected = 0.0
    for coins in product([True, False], repeat=len(by_depth)):
        chance = math.prod(a if heads else 1.0 - a for a, heads in zip(by_depth, coins, strict=True))
        accepted = next((i for i, heads in enumerate(coins) if not heads), len(coins))
        expected += chance * (accepted + 1)
    assert expected_tokens_by_depth(by_depth) == pytest.approx(expected, abs=1e-12)


@st.composite
def trees(draw: st.DrawFn) -> TreeShape:
    size = draw(st.integers(1, 8))
    return TreeShape((-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))))


@st.composite
def shares(draw: st.DrawFn, count: int) -> list[float]:
    parts = draw(st.lists(st.floats(0.0, 1.0), min_size=count + 1, max_size=count + 1))
    total = max(sum(parts), 1e-3)
    return [part / total for part in parts[:-1]]


def walk(shape: TreeShape, table: list[list[float]], node: int = 0) -> dict[int, float]:
    """Tokens → probability, by following every branch and every way to stop."""
    depth = shape.depths[node]
    outcome: dict[int, float] = {}
    stop = 1.0
    for rank, child in enumerate(shape.children[node]):
        stop -= table[depth][rank]
        for tokens, chance in walk(shape, table, child).items():
            outcome[tokens] = outcome.get(tokens, 0.0) + table[depth][rank] * chance
    outcome[depth + 1] = outcome.get(depth + 1, 0.0) + stop
    return outcome


@settings(deadline=None)
@given(data=st.data(), shape=trees())
def test_tree_counts_every_outcome(data: st.DataObject, shape: TreeShape) -> None:
    table = [data.draw(shares(max(shape.width, 1))) for _ in range(max(shape.depth, 1))]
    by_hand = walk(shape, table)
    expected = sum(tokens * chance for tokens, chance in by_hand.items())
    assert expected_tokens_of_tree(shape, table) == pytest.approx(expected, abs=1e-12)
    law = distribution(tree_reach(shape, table))
    assert law == pytest.approx([by_hand.get(tokens, 0.0) for tokens in range(shape.depth + 2)], abs=1e-12)
    # The same acceptance at every depth may be given once.
    same = [table[0]] * len(table)
    assert expected_tokens_of_tree(shape, table[0]) == expected_tokens_of_tree(shape, same)


@given(alpha=probabilities, gamma=st.integers(0, 12))
def test_a_tree_of_width_one_is_a_chain(alpha: float, gamma: int) -> None:
    tree = expected_tokens_of_tree(TreeShape.chain(gamma), [alpha])
    assert tree == pytest.approx(expected_tokens(alpha, gamma), rel=1e-12)
    assert expected_tokens_by_depth([alpha] * gamma) == pytest.approx(tree, rel=1e-12)


@pytest.mark.parametrize("alpha", [1.5, -0.1, math.nan, math.inf, True, "0.7", None])
def test_bad_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha is .*: give"):
        expected_tokens(alpha, 4)


@pytest.mark.parametrize("gamma", [-1, 2.5, True, "4"])
def test_bad_gamma_is_refused(gamma: int) -> None:
    with pytest.raises(ValueError, match=r"gamma is .*: give"):
        expected_tokens(0.7, gamma)
    with pytest.raises(ValueError, match=r"gamma is .*: give"):
        accepted_drafts(0.7, gamma)


def test_bad_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_cost is -1: give 0 or more"):
        speedup(0.7, 4, -1.0)
    with pytest.raises(ValueError, match="verify_cost is 0: give a number above 0"):
        speedup(0.7, 4, 0.1, 0.0)
    with pytest.raises(ValueError, match="divide all costs by it"):
        speedup(0.7, 1, 0.1, {1: 20.0, 2: 21.0})
    with pytest.raises(ValueError, match="a row count is 0"):
        speedup(0.7, 1, 0.1, {0: 1.0, 2: 1.0})


@pytest.mark.parametrize(
    ("ranks", "fix"),
    [
        ([], "at least the first child"),
        ([0.6, 0.6], "adds up to 1.2"),
        ([0.6], "add ranks or narrow the tree"),
        ([[0.6, 0.2]], "add some depths or cut the tree"),
        ([0.6, math.nan], "finite"),
        ([[0.6, 0.2], [0.6, 0.7]], "at depth 2 adds up"),
    ],
)
def test_bad_rank_acceptance_is_refused(ranks: list[float], fix: str) -> None:
    shape = TreeShape.from_rank_paths([(0,), (1,), (0, 0)])
    with pytest.raises(ValueError, match=fix):
        expected_tokens_of_tree(shape, ranks)
