"""Matrices in the order in which a pass in C reads them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127
LARGE_PAGE = 1 << 21


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [out, in] → bytes, and the scale [out] of each output."""
    rows = matrix.float()
    scales = (rows.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round().to(torch.int8), scales


@dataclass(frozen=True)
class Order:
    """Outputs are a multiple of 32 and lie 32 after the other."""

    tiled: bool
    """In tiles of 16 outputs, as `products.h` reads them: [out / 32][in / 16 b][2][16][16][b], b inputs in four bytes.
    Else in panels, as `float_products.h` does: [out / 32][in][32]."""
    gate: int
    """So many outputs of the gate stand before as many of what it is for."""
    inputs_in_bytes: int
    """Inputs of a matrix in bytes are a multiple of this."""

    def arranged(self, matrix: Tensor) -> Tensor:
        """A view of matrix [out, in]."""
        outputs, inputs = matrix.shape
        if not self.tiled:
            return matrix.view(outputs // 32, 32, inputs).transpose(1, 2)
        beside = 4 // matrix.element_size()
        return matrix.view(outputs // 32, 2, 16, inputs // (16 * beside), 16, beside).permute(0, 3, 1, 4, 2, 5)

    def restored(self, place: Tensor, outputs: int, inputs: int) -> Tensor:
        """[out, in] of what lies in this order."""
        if not self.tiled:
            return place.view(outputs // 32, inputs, 32).transpose(1, 2).reshape(outputs, inputs)
        beside = 4 // place.element_size()
        tiles = place.view(outputs // 32, inputs // (16 * beside), 2, 16, 16, beside)
        return tiles.permute(0, 2, 4, 1, 3, 5).reshape(outputs, inputs)


TILES = Order(tiled=True, gate=16, inputs_in_bytes=64)
PANELS = Order(tiled=False, gate=32, inputs_in_bytes=32)


class Shelf:
    """Matrices in one stretch of memory, in large pages where the system has them."""

    def __init__(self, weights: int, order: Order, dtype: torch.dtype) -> None:
        """Room for so many weights: in bytes, or in float32 or bfloat16."""
        self.order, self.dtype = order, dtype
        self.area = torch.frombuffer(_stretch(dtype.itemsize * weights + LARGE_PAGE), dtype=dtype)
        self.used = (-self.area.data_ptr() % LARGE_PAGE) // dtype.itemsize
        self.scales: list[Tensor] = []

    def put(self, matrix: Tensor) -> tuple[int, int | None]:
        """matrix [out, in]; where it is, and where the scales of its outputs are, if it is in bytes."""
        where = None
        if self.dtype == torch.int8:
            matrix, scales = rounded(matrix)
            self.scales.append(scales)
            where = scales.data_ptr()
        place = self.area[self.used : self.used + matrix.numel()]
        self.used += matrix.numel()
        arranged = self.order.arranged(matrix.contiguous())
        place.view(arranged.shape).copy_(arranged)
        return place.data_ptr(), where

    def last(self, outputs: int, inputs: int) -> Tensor:
        """The matrix [outputs, inputs] that was put here last, in its own order, as it was rounded."""
        matrix = self.order.restored(self.area[self.used - outputs * inputs : self.used], outputs, inputs)
        return matrix * self.scales[-1][:, None] if self.scales else matrix


def _stretch(size: int) -> mmap.mmap:
    """Memory of its own: what could be shared, which is what `mmap` gives where nothing else is asked for, has small
    pages on most systems."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area
