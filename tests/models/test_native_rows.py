"""A few rows times a matrix in C: the right numbers, the same bits beside any other rows, and PyTorch without C."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.native import rows
from forerun.models.native.rows import MOST_ROWS, linear
from forerun.models.product import Product

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def right(x: Tensor, weight: Tensor, bias: Tensor | None, plus: Tensor | None) -> Tensor:
    """In float64."""
    product = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return product if plus is None else product + plus


def in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's product is no way out."""
    monkeypatch.setattr(functional, "linear", lambda *anything: pytest.fail("it was made by PyTorch"))


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 40),
    width=st.integers(1, 700),
    size=st.integers(1, 300),
    biased=st.booleans(),
    added=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(count: int, width: int, size: int, biased: bool, added: bool, seed: int) -> None:
    x, weight = drawn(count, width, seed=seed), drawn(size, width, seed=seed + 1)
    bias = drawn(size, seed=seed + 2) if biased else None
    plus = drawn(count, size, seed=seed + 3) if added else None
    with pytest.MonkeyPatch.context() as patch:
        expected = right(x, weight, bias, plus)
        in_c(patch)
        found = linear(x, weight, bias, plus)
    largest = functional.linear(x.abs().double(), weight.abs().double())  # what rounding errors are relative to
    assert ((found - expected).abs() <= 1e-6 * largest + 1e-6).all()


@pytest.mark.parametrize(("width", "size"), [(576, 96), (1, 1), (7, 5), (130, 33), (1536, 64), (64, 2051)])
def test_a_row_gives_the_same_bits_beside_any_others(width: int, size: int) -> None:
    x, weight, bias, plus = drawn(MOST_ROWS, width), drawn(size, width), drawn(size), drawn(MOST_ROWS, size)
    alone = torch.cat([linear(x[i : i + 1], weight, bias, plus[i : i + 1]) for i in range(MOST_ROWS)])
    for count in range(1, MOST_ROWS + 1):
        assert torch.equal(linear(x[:count], weight, bias, plus[:count]), alone[:count])
        assert torch.equal(linear(x[-count:], weight, bias, plus[-count:]), alone[-count:])


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_threads_change_nothing(count: int) -> None:
    x, weight = drawn(count, 576), drawn(1001, 576)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nothing_is_read_or_written_beside_it() -> None:
    """Numbers around the operands that would show in any sum, and a result of which every place is written."""
    around = torch.full((4, 7 * 33 + 64), torch.nan)
    x, weight, plus = around[0, 32 : 32 + 5 * 33], around[1, 32 : 32 + 7 * 33], around[2, 32 : 32 + 5 * 7]
    for part in (x, weight, plus):
        part.copy_(drawn(part.numel()))
    found = linear(x.view(5, 33), weight.view(7, 33), None, plus.view(5, 7))
    assert torch.allclose(found.double(), right(x.view(5, 33), weight.view(7, 33), None, plus.view(5, 7)), atol=1e-4)


def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, weight, plus = drawn(6, 80), drawn(20, 40), drawn(20, 6).T
    expected = right(wide[:, 40:], weight, None, plus)
    in_c(monkeypatch)
    assert torch.allclose(linear(wide[:, 40:], weight, None, plus).double(), expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (1, 1, 40)])
def test_rows_of_any_shape(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(*shape), drawn(20, 40)
    expected = functional.linear(x, weight)
    in_c(monkeypatch)
    found = linear(x, weight)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-4)


def test_what_is_no_number_stays_so() -> None:
    x, weight = drawn(3, 40), drawn(20, 40)
    x[1, 39], weight[5, 0] = torch.nan, torch.inf
    found = linear(x, weight)
    assert found[1].isnan().all()
    assert found[0].isfinite().sum() == 19
    assert found[2, 5].isinf()


# --- where PyTorch multiplies ----------------------------------------------------------------------------------


@pytest.fixture
def no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "library", lambda: lambda *anything: pytest.fail("C was called"))


@pytest.mark.usefixtures("no_call")
def test_more_rows_and_none_are_for_pytorch() -> None:
    weight = drawn(20, 40)
    for count in (0, MOST_ROWS + 1):
        x = drawn(count, 40)
        assert torch.equal(linear(x, weight), functional.linear(x, weight))
    assert linear(drawn(3, 0), drawn(20, 0)).shape == (3, 20)


@pytest.mark.usefixtures("no_call")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_are_for_pytorch(dtype: torch.dtype) -> None:
    x, weight = drawn(3, 40).to(dtype), drawn(20, 40).to(dtype)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))


@pytest.mark.usefixtures("no_call")
def test_a_turned_matrix_is_for_pytorch() -> None:
    x, weight = drawn(3, 40), drawn(40, 20).T
    assert torch.equal(linear(x, weight), functional.linear(x, weight))


@pytest.mark.usefixtures("no_call")
def test_what_does_not_fit_is_refused_and_not_read() -> None:
    with pytest.raises(RuntimeError):
        linear(drawn(3, 20), drawn(20, 40))
    with pytest.raises(RuntimeError):
        linear(drawn(3, 40), drawn(20, 40), drawn(19))
    assert linear(drawn(3, 40), drawn(20, 40), None, drawn(20)).shape == (3, 20)


@pytest.mark.usefixtures("no_call")
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "plus"])
def test_gradients_are_for_pytorch(wanted: str) -> None:
    given = {"x": drawn(3, 40), "weight": drawn(20, 40), "bias": drawn(20), "plus": drawn(3, 20)}
    given[wanted].requires_grad_()
    (gradient,) = torch.autograd.grad(linear(**given).sum(), given[wanted])
    assert gradient.abs().sum() > 0


def test_weights_to_be_trained_are_used_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(40, 20), drawn(3, 40)
    in_c(monkeypatch)
    with torch.no_grad():
        assert not linear(x, layer.weight, layer.bias).requires_grad


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Linear(40, 20), nn.Linear(40, 12)
    product, x, plus = Product(*layers), drawn(5, 40), drawn(5, 32)
    product.prepare()
    with torch.inference_mode():
        found = product(x, plus)
        monkeypatch.setattr(rows, "library", lambda: None)
        plain = product(x, plus)
        assert torch.equal(plain, plus + functional.linear(x, *product.matrix()))
    assert torch.allclose(found, plain, atol=1e-5)


def test_what_pytorch_refuses_is_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(20, 8)
    with pytest.raises(RuntimeError):
        linear(x, weight, None, torch.randn(20, 3))
    with pytest.raises(RuntimeError):
        linear(x, weight, torch.randn(20, 1))
