"""Arithmetic that has to be the same everywhere: sums, draws and logarithms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.core import exact

LAST = 1 - 2.0**-52
"""The largest uniform number there is."""


def plain_draw(weights: list[float], u: float) -> int:
    """The definition: the first token whose cumulative weight, counted in units, exceeds u times the total."""
    counts = [int(weight * 2.0**50) for weight in weights]
    level, cumulative = u * float(sum(counts)), 0
    for token, count in enumerate(counts):
        cumulative += count
        if cumulative > level:
            return token
    raise AssertionError("no weight at all")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- log -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        np.random.default_rng(0).uniform(0, 1, 100_000) + 1e-300,
        np.exp(np.random.default_rng(1).uniform(-700, 700, 100_000)),
        1 + np.random.default_rng(2).uniform(-1, 1, 100_000) * 1e-3,
        1 + np.random.default_rng(3).integers(-(2**20), 2**20, 100_000) * 2.0**-52,
        np.exp2(np.arange(-1022.0, 1024.0)),
        math.sqrt(2) * (1 + np.arange(-1000, 1000) * 2.0**-52),  # where the mantissa is split
        math.sqrt(0.5) * (1 + np.arange(-1000, 1000) * 2.0**-52),
        np.array([np.finfo(np.float64).tiny, np.finfo(np.float64).max, 1 - 2.0**-53, 2.0**-53, math.e, math.pi]),
    ],
    ids=["unit", "all magnitudes", "near 1", "last places of 1", "powers of 2", "sqrt 2", "sqrt half", "extremes"],
)
def test_log_is_as_good_as_the_library(x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    got, expected = exact.log(torch.from_numpy(x)).numpy(), np.log(x)
    assert got.dtype == np.float64
    assert np.all(np.abs(got - expected) <= 1e-15 * np.abs(expected))


def test_log_of_one_is_zero_and_leaves_its_argument_alone() -> None:
    x = f64(1.0, 0.5, 3.0)
    assert float(exact.log(x)[0]) == 0.0
    assert x.tolist() == [1.0, 0.5, 3.0]


def test_log_of_any_shape_and_layout() -> None:
    x = torch.rand(7, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    assert torch.equal(exact.log(x.permute(2, 0, 1)), exact.log(x).permute(2, 0, 1))
    assert torch.equal(exact.log(x[::2, 1:]), exact.log(x)[::2, 1:])


# --- mass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_does_not_depend_on_the_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    p = torch.softmax(torch.randn(4, 49_152, generator=generator, dtype=dtype) * 5, -1)
    total = exact.mass(p)
    assert total.dtype is torch.float64
    assert total.tolist() == pytest.approx(p.double().sum(-1).tolist(), abs=49_152 * 2.0**-50)
    for _ in range(5):
        order = torch.randperm(49_152, generator=generator)
        assert torch.equal(exact.mass(p[:, order]), total)
    halves = exact.mass(p[:, :20_000]) + exact.mass(p[:, 20_000:])
    assert torch.equal(halves, total)
    assert torch.equal(torch.stack([exact.mass(row) for row in p]), total)


def test_mass_of_simple_rows_is_exact() -> None:
    assert exact.mass(f64(0.5, 0.25, 0.125)).item() == 0.875
    assert exact.mass(torch.zeros(3, 4)).tolist() == [0, 0, 0]
    assert exact.mass(torch.tensor([[1.0]])).tolist() == [1.0]


def test_fixed_counts_whole_units_downwards() -> None:
    weights = f64(0.0, 2.0**-51, 2.0**-50, 1.75 * 2.0**-50, 1.0, 4.0)
    assert exact.fixed(weights).tolist() == [0, 0, 1, 1, 1 << 50, 1 << 52]
    singles = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(exact.fixed(singles), exact.fixed(singles.double()))


# --- draw ----------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> list[float]:
    """Rows with zeros, ties and weights below a unit, somewhere above a total of 1e-9."""
    weight = st.sampled_from([0.0, 0.0, 1.0, 0.5, 0.25, 1 / 3, 1e-3, 1e-12, 1e-16, 1e-300]) | st.floats(0, 1)
    values = draw(st.lists(weight, min_size=1, max_size=12))
    gap = draw(st.sampled_from([0, 0, 1, 250, 256, 300, 600]))
    at = draw(st.integers(0, len(values)))
    values = values[:at] + [0.0] * gap + values[at:]
    if sum(values) < 1e-9:
        values[draw(st.integers(0, len(values) - 1))] = 1.0
    scale = max(1.0, sum(values) / 7)
    return [value / scale for value in values]


UNIFORMS = st.sampled_from([0.0, 2.0**-52, 0.25, 0.5, 0.5 - 2.0**-52, 0.75, LAST]) | st.integers(0, 2**52 - 1).map(
    lambda bits: bits * 2.0**-52
)


@settings(max_examples=250, deadline=None)
@given(rows(), UNIFORMS, st.sampled_from([torch.float32, torch.float64]))
def test_draw_is_the_plain_cumulative_definition(weights: list[float], u: float, dtype: torch.dtype) -> None:
    row = torch.tensor(weights, dtype=dtype)
    token = int(exact.draw(row, torch.tensor(u, dtype=torch.float64)))
    assert token == plain_draw(row.double().tolist(), u)
    assert float(row[token]) > 0


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 511, 512, 1000, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_on_wide_rows(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    p = torch.softmax(torch.randn(6, vocabulary, generator=generator, dtype=dtype) * 4, -1)
    p = p * (torch.rand(6, vocabulary, generator=generator) < 0.5)
    p[:, vocabulary // 2] += 0.01  # never a row without weight
    u = torch.cat([torch.rand(4, generator=generator, dtype=torch.float64), f64(0.0, LAST)])
    tokens = exact.draw(p, u)
    assert tokens.dtype is torch.int64
    assert tokens.tolist() == [
        plain_draw(row, level) for row, level in zip(p.double().tolist(), u.tolist(), strict=True)
    ]
    assert bool((p.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.parametrize("vocabulary", [1, 3, 256, 700])
@pytest.mark.parametrize("u", [0.0, LAST])
def test_the_ends_never_take_a_token_without_weight(vocabulary: int, u: float) -> None:
    """One weight anywhere: it is always drawn, whatever stands before or behind it."""
    for token in {0, vocabulary // 2, vocabulary - 1}:
        for weight in (1.0, 0.3, 1e-10, 7.9, 2.0**-50, 1 - 2.0**-53):
            row = torch.zeros(vocabulary, dtype=torch.float64)
            row[token] = weight
            assert int(exact.draw(row, torch.tensor(u, dtype=torch.float64))) == token


def test_last_uniform_stays_in_range_for_all_totals() -> None:
    """u · total must not round up to the total: 0 is behind the weights, and drawing it would be seen."""
    totals = torch.rand(20_000, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 7.9 + 1e-9
    weights = torch.stack([totals / 3, totals - totals / 3, torch.zeros_like(totals)], -1)
    assert exact.draw(weights, torch.full_like(totals, LAST)).tolist() == [1] * 20_000


def test_very_peaked_rows() -> None:
    row = torch.full((1000,), 1e-13, dtype=torch.float64)
    row[700] = 1 - 999e-13
    assert exact.draw(row.expand(3, -1), f64(0.0, 0.5, LAST)).tolist() == [0, 700, 999]
    one_hot = torch.zeros(1000)
    one_hot[31] = 1.0
    assert exact.draw(one_hot.expand(3, -1), f64(0.0, 0.5, LAST)).tolist() == [31, 31, 31]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.125, 4.0])
def test_law_over_a_fine_grid_is_the_weights(dtype: torch.dtype, scale: float) -> None:
    """Weights in 64ths and 4,096 equally spaced uniforms: every token comes exactly as often as it weighs."""
    counts = torch.tensor([0, 5, 0, 20, 1, 0, 30, 8, 0])
    weights = (torch.cat([counts[:4], torch.zeros(400), counts[4:]]) / 64).to(dtype) * scale
    u = torch.arange(4096, dtype=torch.float64) / 4096
    drawn = torch.bincount(exact.draw(weights.expand(4096, -1), u), minlength=weights.numel())
    assert torch.equal(drawn, (weights.double() / scale * 4096).long())


def test_draw_of_batched_shapes_and_layouts() -> None:
    generator = torch.Generator().manual_seed(2)
    p, u = torch.rand(2, 3, 4, 300, generator=generator) / 300, torch.rand(2, 3, 4, generator=generator).double()
    tokens = exact.draw(p, u)
    assert tokens.shape == (2, 3, 4)
    assert torch.equal(tokens.flatten(), exact.draw(p.view(-1, 300), u.flatten()))
    assert torch.equal(exact.draw(p.transpose(0, 2), u.transpose(0, 2)), tokens.transpose(0, 2))
    columns = (torch.rand(512, 4, generator=generator) / 512).T
    assert torch.equal(exact.draw(columns, u[0, 0]), exact.draw(columns.contiguous(), u[0, 0]))
    for vocabulary in (3, 256):
        assert exact.draw(torch.zeros(0, vocabulary), torch.zeros(0)).shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(6)
    for dtype in (torch.float32, torch.float64):
        p = torch.softmax(torch.randn(64, 49_152, generator=generator, dtype=dtype) * 4, -1)
        u = torch.rand(64, generator=generator, dtype=torch.float64)
        assert torch.equal(exact.draw(p, u), exact.draw(p.cuda(), u.cuda()).cpu())
        assert torch.equal(exact.mass(p), exact.mass(p.cuda()).cpu())
        x = p.double().clamp_min(1e-300)
        assert torch.equal(exact.log(x), exact.log(x.cuda()).cpu())
