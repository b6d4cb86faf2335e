"""Norms, gates and rotation: the plain forms against the model's, the Triton source against the plain forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.rows import rms_norm, silu_mul, write_and_rotate
from forerun.models.config import Rope
from forerun.models.rope import angles, frequencies, rotate
from tests.kernels.packing import HALF

KINDS = [torch.float32, HALF]


def close(got: Tensor, want: Tensor) -> None:
    """But for the order of sums: one unit in the last place of 16 bits."""
    loose = got.dtype != torch.float32
    torch.testing.assert_close(got, want, rtol=8e-3 if loose else 1e-5, atol=1e-2 if loose else 1e-5)


def random(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None, seed: int = 0
) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("size", [64, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("added", [False, True])
def test_norm(
    dtype: torch.dtype, size: int, offset: float, added: bool, built: Callable[..., Any], device: torch.device
) -> None:
    x, residual = random(2, 5, size, dtype=dtype, device=device)
    weight = random(size, dtype=dtype, device=device, seed=1)
    mine, theirs = x.clone(), x.clone()
    given = {"residual": residual if added else None, "offset": offset}
    got = built(rms_norm)(mine, weight, 1e-5, **given)
    close(got, rms_norm.plain(theirs, weight, 1e-5, residual=given["residual"], offset=offset))  # type: ignore[arg-type]
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, x + residual if added else x)


def test_the_plain_norm_is_torchs() -> None:
    x, residual = random(2, 5, 48)
    want = functional.rms_norm(x + residual, (48,), torch.ones(48), 1e-5)
    torch.testing.assert_close(rms_norm(x, torch.ones(48), 1e-5, residual=residual), want)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in the interpreter's sigmoid
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("size", [48, 1536])
def test_gate(dtype: torch.dtype, activation: str, size: int, built: Callable[..., Any], device: torch.device) -> None:
    both = random(3, 2 * size, dtype=dtype, device=device) * 3
    close(built(silu_mul)(both, activation), silu_mul.plain(both, activation))


def test_an_activation_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="use silu or gelu"):
        silu_mul(torch.zeros(1, 2), "relu")


def tables(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    per_position, scale = frequencies(Rope(theta=10000.0), size)
    turned = torch.arange(50)[:, None].float() * per_position
    return (turned.cos() * scale).to(dtype), (turned.sin() * scale).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_the_plain_rotation_is_the_models(dtype: torch.dtype) -> None:
    heads, kv_heads, size = 6, 2, 64
    cos, sin = tables(size, dtype)
    qkv = random(4, (heads + 2 * kv_heads) * size, dtype=dtype)
    keys, values = torch.zeros(2, 20, kv_heads, size, dtype=dtype)
    positions, slots = torch.tensor([3, 4, 4, 17]), torch.tensor([5, 19, 0, 7])
    q = write_and_rotate(qkv, keys, values, positions, slots, cos=cos, sin=sin)
    every = qkv.view(4, -1, size)
    want = rotate(every[:, : heads + kv_heads], *angles(Rope(theta=10000.0), size, positions, dtype))
    close(q, want[:, :heads])
    close(keys[slots], want[:, heads:])
    assert torch.equal(values[slots], every[:, heads + kv_heads :])


@pytest.mark.parametrize(
    ("dtype", "table", "size", "norm", "offset"),
    [
        (torch.float32, torch.float32, 64, False, 0.0),
        (torch.float32, torch.float32, 80, True, 0.0),
        (HALF, HALF, 128, False, 0.0),
        (HALF, HALF, 64, True, 0.0),
        (HALF, torch.float32, 64, True, 1.0),
        (HALF, None, 64, False, 0.0),
    ],
)
@pytest.mark.parametrize("rows", [3, 70])
def test_rotation(
    dtype: torch.dtype,
    table: torch.dtype | None,
    size: int,
    norm: bool,
    offset: float,
    rows: int,
    built: Callable[..., Any],
    device: torch.device,
) -> None:
    heads, kv_heads = (6, 2) if rows == 3 else (3, 1)
    qkv = random(rows, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(90, generator=generator)[:rows].to(device)
    slots[1] = -1
    positions = torch.randint(0, 50, (rows,), generator=generator).to(device)
    given: dict[str, Any] = {"eps": 1e-5, "offset": offset}
    if table is not None:
        given["cos"], given["sin"] = (t.to(device) for t in tables(size, table))
    if norm:
        given["q_norm"], given["k_norm"] = random(2, size, dtype=dtype, device=device, seed=2)
    results = []
    for form in (write_and_rotate.plain, built(write_and_rotate)):
        cache = random(90, 2, kv_heads, size, dtype=dtype, device=device, seed=3)  # keys and values side by side
        q = form(qkv, cache[:, 0], cache[:, 1], positions, slots, **given)
        results.append((q, cache))
    (want, want_cache), (got, got_cache) = results
    close(got, want)
    close(got_cache, want_cache)
    untouched = torch.ones(90, dtype=torch.bool, device=device)
    untouched[slots[slots >= 0]] = False
    assert torch.equal(got_cache[untouched], want_cache[untouched])
    assert torch.equal(got_cache[:, 1], want_cache[:, 1])
