"""Attention over a text and over keys of one's own, in two parts: against one softmax over all, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels.joint import attend, supports
from forerun.train.unroll import joint
from tests.kernels.conftest import INTERPRETED, ON_GPU

pytestmark = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="Triton cannot run here")


def rows(shape: tuple[int, int, int, int, int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    count, length, steps, heads, kv, size = shape
    generator = torch.Generator().manual_seed(length)
    sizes = [
        (count, length, heads, size),
        *[(count, length, kv, size)] * 2,
        *[(count, length, steps, kv, size)] * 2,
    ]
    return [torch.randn(each, generator=generator).to(device, dtype).requires_grad_() for each in sizes]


@pytest.mark.parametrize("shape", [(2, 7, 1, 6, 2, 16), (1, 9, 3, 4, 4, 32), (3, 5, 6, 9, 3, 64), (1, 1, 2, 3, 1, 16)])
def test_both_parts_are_one_softmax(
    shape: tuple[int, int, int, int, int, int], built: Callable[..., Any], device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = rows(shape, device, dtype)
    exact = [each.detach().float().requires_grad_() for each in given]
    scale = 0.3
    found: Tensor = partial(attend, scale=scale)(*given)
    right: Tensor = partial(joint, scale=scale)(*exact)
    rough = dtype == torch.bfloat16
    relative, absolute = (2e-2, 3e-2) if rough else (1e-4, 1e-5)
    torch.testing.assert_close(found.float(), right, rtol=relative, atol=absolute)
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(device)
    torch.autograd.backward((found.float() * weights).sum())
    torch.autograd.backward((right * weights).sum())
    for own, other in zip(given, exact, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(own.grad.float(), other.grad, rtol=relative, atol=absolute)


def test_what_is_taken() -> None:
    assert not supports(torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16))  # on a CPU
