"""Products of few rows: the Triton source against the plain form, and what a plan may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels import product
from forerun.kernels.product import Plan, gated_product, skinny_product, supports
from forerun.kernels.rows import silu_mul
from tests.kernels.packing import HALF
from tests.kernels.test_rows import random

ODD = [
    (1, 64, 64, Plan(16, 32, 1, 4, 2)),
    (3, 50, 64, Plan(32, 64, 1, 4, 3)),  # a tile that sticks out
    (16, 64, 72, Plan(64, 32, 1, 4, 2)),  # a depth with a remainder
    (17, 40, 100, Plan(16, 64, 1, 4, 2)),
    (5, 80, 256, Plan(64, 32, 4, 4, 2)),
    (33, 33, 200, Plan(32, 32, 2, 4, 2)),  # the last split has less, and one step of it nothing
    (64, 48, 96, Plan(16, 32, 3, 4, 2)),
    (2, 300, 96, Plan(128, 32, 2, 8, 2)),  # two tiles of what adds the splits up
]


def near(got: Tensor, want: Tensor) -> None:
    """But for the order of sums: two roundings of 16 bits."""
    torch.testing.assert_close(got, want, rtol=8e-3 if want.dtype == torch.bfloat16 else 2e-3, atol=2e-3)


def operands(rows: int, size: int, depth: int, device: torch.device, dtype: torch.dtype = HALF) -> tuple[Tensor, ...]:
    x = random(rows, depth, dtype=dtype, device=device)
    weight = (random(size, depth, device=device, seed=1) * depth**-0.5).to(dtype)
    return x, weight, random(size, dtype=dtype, device=device, seed=2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "size", "depth", "plan"), ODD)
def test_a_product(
    rows: int, size: int, depth: int, plan: Plan, biased: bool, built: Callable[..., Any], device: torch.device
) -> None:
    x, weight, bias = operands(rows, size, depth, device)
    given = (x, weight, bias if biased else None)
    near(built(skinny_product)(*given, plan=plan), skinny_product.plain(*given))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in the interpreter's sigmoid
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "size", "depth", "plan"), ODD)
def test_a_gated_product(
    rows: int,
    size: int,
    depth: int,
    plan: Plan,
    biased: bool,
    activation: str,
    built: Callable[..., Any],
    device: torch.device,
) -> None:
    x, weight, bias = operands(rows, 2 * size, depth, device)
    given = (x, weight, bias if biased else None)
    got = built(gated_product)(*given, activation=activation, plan=plan)
    near(got, gated_product.plain(*given, activation=activation))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_gate_rounds_where_two_kernels_would(built: Callable[..., Any], device: torch.device) -> None:
    """The same bits as a product by the same plan and `silu_mul` after it."""
    x, weight, _ = operands(7, 96, 128, device)
    both = built(skinny_product)(x, weight, plan=Plan(16, 32, 1, 4, 2))
    got = built(gated_product)(x, weight, plan=Plan(16, 32, 1, 4, 2))
    assert torch.equal(got, built(silu_mul)(both))


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_and_results_may_be_parts_of_others(splits: int, built: Callable[..., Any], device: torch.device) -> None:
    wide = random(5, 96, dtype=HALF, device=device)
    _, weight, _ = operands(5, 40, 64, device)
    whole = torch.full((6, 50), 7.0, dtype=HALF, device=device)
    out = whole[:5, :40]
    assert built(skinny_product)(wide[:, 16:80], weight, out=out, plan=Plan(32, 32, splits, 4, 2)) is out
    near(out, skinny_product.plain(wide[:, 16:80], weight))
    assert bool((whole[5:] == 7).all())
    assert bool((whole[:, 40:] == 7).all())


def test_the_plain_form_writes_where_it_is_told() -> None:
    x, weight, bias = operands(3, 8, 16, torch.device("cpu"), torch.float32)
    out = torch.empty(3, 8)
    assert skinny_product(x, weight, bias, out=out) is out
    torch.testing.assert_close(out, x @ weight.T + bias)
    half = torch.empty(3, 4)
    assert gated_product(x, weight, bias, out=half) is half
    torch.testing.assert_close(half, silu_mul(out))


def test_a_plan_is_chosen_and_a_measured_one_goes_first(
    built: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, _ = operands(3, 64, 64, device)
    near(built(skinny_product)(x, weight), skinny_product.plain(x, weight))
    assert built(gated_product)(x, weight).shape == (3, 32)
    monkeypatch.setitem(product.MEASURED, (64, 64, False), Plan(0, 64, 1, 4, 2))
    with pytest.raises(ZeroDivisionError):
        built(skinny_product)(x, weight)
    near(built(gated_product)(x, weight), gated_product.plain(x, weight))


def test_a_row_does_not_depend_on_the_rows_beside_it(built: Callable[..., Any], device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter leaves the order of sums to NumPy")
    x, weight, _ = operands(64, 1000, 2048, device)
    for plan in (Plan(64, 128, 1, 4, 4), Plan(128, 64, 2, 8, 3), Plan(16, 256, 4, 4, 4)):
        want = built(skinny_product)(x, weight, plan=plan)
        for rows in (1, 3, 16, 17, 32, 33):
            assert torch.equal(built(skinny_product)(x[:rows], weight, plan=plan), want[:rows])
        assert torch.equal(built(skinny_product)(x, weight, plan=replace(plan, overlap=False)), want)


@pytest.mark.parametrize("size", [16, 576, 960, 4096, 6144, 14336, 49152])
@pytest.mark.parametrize("depth", [64, 576, 4096, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_a_plan_splits_only_what_does_not_fill_the_device(size: int, depth: int, gated: bool) -> None:
    plan = Plan.choose(size, depth, gated)
    programs = -(-size // plan.tile_n)
    assert plan.tile_n in {16, 32, 64}
    assert plan.tile_k >= 64
    assert plan.splits & (plan.splits - 1) == 0
    assert plan.splits == 1 or programs * plan.splits <= product.FULL
    assert (plan.splits - 1) * -(-depth // (plan.splits * plan.tile_k)) * plan.tile_k < depth  # none has nothing
    for pad in (16, 32, 64):
        stages = product._stages(plan, pad, gated)
        assert 2 <= stages <= plan.stages
        assert stages * ((2 if gated else 1) * plan.tile_n + pad) * plan.tile_k * 2 <= product.SHARED


def test_what_is_asked_for_early_lies_in_the_weight() -> None:
    for size, depth in ((4096, 4096), (49152, 576), (576, 1536), (64, 128), (64, 120)):
        early = product._early(torch.empty(size, depth, dtype=HALF), depth)
        assert early == 0 if depth < 128 else 128 <= early <= depth
        assert early & (early - 1) == 0
        assert early <= 128 or early * size * 2 <= product.EARLY
    assert product._early(torch.empty(64, 132, dtype=HALF), 132) == 0  # rows that are not aligned


def test_what_gains() -> None:
    weight = torch.empty(32, 64, dtype=torch.bfloat16)
    assert supports(1, weight)
    assert supports(64, weight)
    assert not supports(0, weight)
    assert not supports(65, weight)
    assert not supports(1, weight.float())
    assert not supports(1, weight[:, :40])
    assert not supports(1, weight.T)
