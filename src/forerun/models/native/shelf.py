"""Matrices in the order in which `products.h` reads them."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

BYTE_TILE = 64
"""Inputs of a matrix in bytes are a multiple of this."""
LARGEST = 127
LARGE_PAGE = 1 << 21


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [out, in] → bytes, and the scale [out] of each output."""
    rows = matrix.float()
    scales = (rows.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round().to(torch.int8), scales


class Shelf:
    """Matrices in one stretch of memory, in large pages where the system has them."""

    def __init__(self, weights: int, *, in_bytes: bool = False) -> None:
        self.dtype = torch.int8 if in_bytes else torch.bfloat16
        area = mmap.mmap(-1, self.dtype.itemsize * weights + LARGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        self.area = torch.frombuffer(area, dtype=self.dtype)
        self.used = (-self.area.data_ptr() % LARGE_PAGE) // self.dtype.itemsize
        self.scales: list[Tensor] = []

    def put(self, matrix: Tensor) -> tuple[int, int | None]:
        """matrix [out, in], both multiples of 32, in bytes inputs of `BYTE_TILE`; where it is, and where the scales of
        its outputs are."""
        outputs, inputs = matrix.shape
        where = None
        if self.dtype == torch.int8:
            matrix, scales = rounded(matrix)
            self.scales.append(scales)
            where = scales.data_ptr()
        place = self.area[self.used : self.used + matrix.numel()]
        self.used += matrix.numel()
        beside = 4 // self.dtype.itemsize
        tiles = matrix.view(outputs // 32, 2, 16, inputs // (16 * beside), 16, beside).permute(0, 3, 1, 4, 2, 5)
        place.view(tiles.shape).copy_(tiles)
        return place.data_ptr(), where

    def last(self, outputs: int, inputs: int) -> Tensor:
        """The matrix [outputs, inputs] that was put here last, in its own order, as it was rounded."""
        place = self.area[self.used - outputs * inputs : self.used]
        beside = 4 // self.dtype.itemsize
        tiles = place.view(outputs // 32, inputs // (16 * beside), 2, 16, 16, beside).permute(0, 2, 4, 1, 3, 5)
        matrix = tiles.reshape(outputs, inputs)
        return (matrix * self.scales[-1][:, None]).bfloat16() if self.scales else matrix
