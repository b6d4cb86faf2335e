"""The simulation against the closed forms: fixed seeds, so a test that passes once passes always."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.core.shape import TreeShape
from forerun.theory import closed_form, monte_carlo
from forerun.theory.closed_form import RankAcceptance
from forerun.theory.comparison import Conditions, compare_chain, compare_tree
from forerun.theory.monte_carlo import Simulation, simulate_chain, simulate_depths, simulate_tree

TREES = [
    TreeShape.chain(0),
    TreeShape.chain(3),
    TreeShape.from_rank_paths([(0,), (1,), (2,)]),
    TreeShape.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    TreeShape((-1, 0, 0, 1, 2, 2, 2, 5, 5, 3)),
]
RANKS: list[RankAcceptance] = [
    [0.55, 0.2, 0.1],
    [[0.5, 0.25, 0.25], [0.7, 0.1, 0.05], [0.3, 0.3, 0.3], [0.9, 0.0, 0.1]],
]


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_chain_agrees_with_the_closed_form(alpha: float, gamma: int) -> None:
    simulation = simulate_chain(alpha, gamma, rounds=50_000, seed=4)
    off = abs(simulation.mean - closed_form.expected_tokens(alpha, gamma))
    assert off <= 3.0 * simulation.standard_error
    assert simulation.standard_error < 0.02  # or else agreeing would mean nothing


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("ranks", RANKS)
def test_tree_agrees_with_the_closed_form(shape: TreeShape, ranks: RankAcceptance) -> None:
    simulation = simulate_tree(shape, ranks, rounds=50_000, seed=8)
    off = abs(simulation.mean - closed_form.expected_tokens_of_tree(shape, ranks))
    assert off <= 3.0 * simulation.standard_error
    assert simulation.standard_error < 0.01


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_histogram_follows_the_law(kind: str) -> None:
    conditions = Conditions(rounds=40_000, seed=3)
    result = compare_chain(0.7, 4, conditions) if kind == "chain" else compare_tree(TREES[-1], RANKS[1], conditions)
    counts = np.asarray(result.simulation.histogram)
    expected = np.asarray(result.distribution) * counts.sum()
    assert counts[0] == expected[0] == 0
    chi_squared = float((((counts - expected)[1:]) ** 2 / expected[1:]).sum())
    assert chi_squared < 20.5  # four degrees of freedom: passed by chance in 4 of 10,000


def test_depths_stop_at_the_first_rejection() -> None:
    simulation = simulate_depths([1.0, 0.0, 1.0, 1.0], rounds=100)
    assert simulation.histogram == (0, 0, 100, 0, 0, 0)
    by_depth = [0.4, 0.7, 0.9]
    simulation = simulate_depths(by_depth, rounds=50_000, seed=2)
    off = abs(simulation.mean - closed_form.expected_tokens_by_depth(by_depth))
    assert off <= 3.0 * simulation.standard_error


def test_mean_and_standard_error_are_those_of_the_rounds() -> None:
    simulation = Simulation(histogram=(0, 2, 1, 3), opening=())
    tokens = np.asarray([1, 1, 2, 3, 3, 3])
    assert simulation.rounds == 6
    assert simulation.mean == pytest.approx(tokens.mean())
    assert simulation.standard_error == pytest.approx(tokens.std(ddof=1) / math.sqrt(6))


def test_a_seed_gives_one_result() -> None:
    assert simulate_chain(0.7, 4, 5000, seed=7) == simulate_chain(0.7, 4, 5000, seed=7)
    assert simulate_chain(0.7, 4, 5000, seed=7) != simulate_chain(0.7, 4, 5000, seed=8)
    shape = TREES[3]
    assert simulate_tree(shape, RANKS[0], 5000, seed=7) == simulate_tree(shape, RANKS[0], 5000, seed=7)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate_chain(0.7, 4, 1001, seed=5)
    done: list[int] = []
    monkeypatch.setattr(monte_carlo, "BLOCK", 400)  # 100 rounds of 4 drafts
    assert simulate_chain(0.7, 4, 1001, seed=5, progress=done.append) == whole
    assert done == [100] * 10 + [1]
    assert whole.rounds == 1001
    assert len(whole.opening) == monte_carlo.OPENING


def test_bad_numbers_are_refused() -> None:
    for rounds in (0, 1, -5):
        with pytest.raises(ValueError, match=r"rounds is .*: give 2 or more"):
            simulate_chain(0.7, 4, rounds)
    with pytest.raises(ValueError, match="seed is -1"):
        simulate_chain(0.7, 4, 10, seed=-1)
    with pytest.raises(ValueError, match="alpha is nan"):
        simulate_chain(math.nan, 4, 10)
    with pytest.raises(ValueError, match="gamma is 1000000000: give 4096 or less"):
        compare_chain(0.7, 10**9, Conditions())
    with pytest.raises(ValueError, match="acceptance at depth 2"):
        simulate_depths([0.5, 1.5], 10)
    with pytest.raises(ValueError, match="add ranks or narrow"):
        simulate_tree(TREES[2], [0.5], 10)
