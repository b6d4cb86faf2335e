"""The tests themselves: right laws pass as often as they say, wrong ones are seen as often as they say."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun.certify.statistics import (
    LEAST_EXPECTED,
    fit,
    noncentrality,
    same_source,
    samples_for,
    survival,
    visible_error,
)


def law(size: int, seed: int) -> Tensor:
    return torch.softmax(2 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), 0)


def drawn(p: Tensor, samples: int, rounds: int, seed: int) -> Tensor:
    """[rounds, V] counts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(p.expand(rounds, -1), samples, replacement=True, generator=generator)
    return torch.zeros(rounds, len(p)).scatter_add_(1, tokens, torch.ones(rounds, samples))


def p_values(p: Tensor, of: Tensor, samples: int, rounds: int = 800) -> list[float]:
    found = [fit(counts, of) for counts in drawn(p, samples, rounds, 7)]
    return [each.p_value for each in found if each is not None]


@pytest.mark.parametrize(("size", "samples"), [(50, 80), (50, 1000), (400, 300), (3, 60)])
def test_p_values_of_a_right_law_are_uniform(size: int, samples: int) -> None:
    p = law(size, seed=size)
    values = p_values(p, p, samples)
    assert stats.kstest(values, "uniform").statistic < 0.06
    for level in (0.1, 0.01):
        assert sum(value < level for value in values) / len(values) < 1.7 * level
    assert min(values) > 1e-5


def test_an_error_of_the_told_size_is_seen_as_often_as_told() -> None:
    """The worst error of its size: δ in proportion to e, up on one half of the probability and down on the other."""
    size, samples, level = 20, 2000, 1e-3
    p = torch.full((size,), 1 / size, dtype=torch.float64)
    error = visible_error(samples, size - 1, level)
    sign = torch.tensor([1.0, -1.0]).repeat(size // 2)
    wrong = p * (1 + 2 * error * sign)
    assert float((wrong - p).abs().sum()) / 2 == pytest.approx(error)
    seen = sum(value < level for value in p_values(wrong, p, samples, 1000)) / 1000
    assert 0.92 < seen < 0.985
    assert samples_for(error, size - 1, level) == pytest.approx(samples, abs=1)


@pytest.mark.parametrize("freedom", [1, 9, 200])
def test_the_laws_are_those_of_scipy(freedom: int) -> None:
    for x in (0.0, 0.3 * freedom, 1.0 * freedom, 3.0 * freedom + 30):
        assert survival(x, freedom) == pytest.approx(stats.chi2.sf(x, freedom), rel=1e-8)
    needed = noncentrality(freedom, 1e-4)
    assert stats.ncx2.sf(stats.chi2.isf(1e-4, freedom), freedom, needed) == pytest.approx(0.95, abs=1e-6)


def test_cells_are_expected_often_enough() -> None:
    p = law(400, seed=1)
    found = fit(drawn(p, 100, 1, 1)[0], p)
    assert found is not None
    assert 2 <= found.cells <= 100 / LEAST_EXPECTED
    assert fit(torch.tensor([9.0, 0.0]), torch.tensor([0.99, 0.01])) is None  # nothing to compare
    assert fit(torch.tensor([50.0, 50.0, 9.0]), torch.tensor([0.5, 0.5, 0.0])) is not None  # what the law forbids


def texts(generator: torch.Generator, p: Tensor, count: int) -> list[list[int]]:
    found: list[list[int]] = (
        torch.multinomial(p, 20 * count, replacement=True, generator=generator).view(-1, 20).tolist()
    )
    return found


def test_texts_of_one_source_and_of_two() -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = law(30, 1), law(30, 2)
    right = [same_source([(texts(generator, p, 15), texts(generator, p, 12))], k) for k in range(60)]
    assert stats.kstest(right, "uniform").pvalue > 0.01
    mixed = 0.8 * p + 0.2 * q
    pairs = [(texts(generator, p, 40), texts(generator, mixed, 40)) for _ in range(3)]
    assert same_source(pairs, 0) < 1e-3
    order = [sorted(text) for text in texts(generator, p, 40)]  # the same tokens in another order
    assert same_source([(texts(generator, p, 40), order)], 0) < 1e-3
    assert math.isclose(same_source([([[1, 2]], [[1, 2]])], 0), 1.0)
