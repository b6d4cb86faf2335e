"""A few rows times a matrix in float32 on a CPU; `rows.c` has the arithmetic.

PyTorch is as fast with one row, and takes several times as long with two to eight, which is what checking drafts needs.
And here a row gives the same bits whatever rows are beside it, up to `MOST_ROWS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from forerun.core.native import build

FLAGS = ["-O3", "-march=native", "-ffp-contract=off"]
MOST_ROWS = 64
"""With more, a product is no longer bound by reading its matrix, and PyTorch is good at it."""


@cache
def library() -> Callable[..., None] | None:
    """The function in C, or None where it cannot be built."""
    found = build.load(Path(__file__).with_suffix(".c"), FLAGS)
    if found is None:
        return None
    function = found.forerun_rows
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4
    function.restype = None
    return function


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in], with bias [out] and `plus` [..., out] where they are given → [..., out]."""
    size, width = weight.shape
    *before, entries = x.shape
    rows = x.numel() // (width or 1)
    suits = (
        0 < rows <= MOST_ROWS
        and entries == width
        and _fits(x, rows * width)
        and _fits(weight, size * width)
        and weight.is_contiguous()
        and (bias is None or (bias.shape == (size,) and _fits(bias, size)))
        and (plus is None or (plus.shape == (*before, size) and _fits(plus, rows * size)))
    )
    call = library() if suits else None
    if call is None:
        result = functional.linear(x, weight, bias)
        return result if plus is None else plus + result
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    plus = None if plus is None else plus.contiguous()
    y = x.new_empty(*before, size)
    call(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if plus is None else plus.data_ptr(),
        y.data_ptr(),
        rows,
        width,
        size,
        torch.get_num_threads(),
    )
    return y


def _fits(tensor: Tensor, entries: int) -> bool:
    """Whether it can be given to C, and no gradient is asked for."""
    known = tensor.dtype is torch.float32 and tensor.is_cpu and tensor.numel() == entries
    return known and not (tensor.requires_grad and torch.is_grad_enabled())
