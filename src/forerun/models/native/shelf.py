"""Matrices in the order in which a pass in C reads them."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from enum import IntEnum

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


class Form(IntEnum):
    """How a matrix of float32 is kept: in fewer bytes where its numbers allow it, see `folded.h`."""

    UNFOLDED = 0
    HALVES = 1
    NIBBLES = 2
    EIGHTHS = 3


GROUP_BYTES = {Form.UNFOLDED: 4096, Form.HALVES: 2048, Form.NIBBLES: 768, Form.EIGHTHS: 1152}
"""For 1,024 numbers."""


@dataclass(frozen=True)
class Place:
    """Where a matrix lies, [outputs, inputs]."""

    address: int
    outputs: int
    inputs: int
    scales: int | None = None
    """Where those of its outputs are, if it is in bytes."""
    form: Form = Form.UNFOLDED


class Shelf:
    """Matrices in one stretch of memory, in large pages where the system has them."""

    def __init__(self, weights: int, order: Order, dtype: torch.dtype, library: ctypes.CDLL | None = None) -> None:
        """Room for so many weights: in bytes, or in float32 or bfloat16. With a `library` that folds, those in float32
        take as few bytes as their numbers allow, and those in bytes have a scale for each 32."""
        self.order, self.dtype, self.library = order, dtype, library
        size = dtype.itemsize * weights
        if library is not None and dtype == torch.int8:
            size = weights // 1024 * GROUP_BYTES[Form.EIGHTHS]
        self.area = torch.frombuffer(_stretch(size + LARGE_PAGE), dtype=torch.uint8)
        self.used = -self.area.data_ptr() % LARGE_PAGE
        self.scales: list[Tensor] = []
        self.places: list[Place] = []

    def put(self, matrix: Tensor) -> Place:
        """matrix [out, in]"""
        matrix, (outputs, inputs) = matrix.contiguous(), matrix.shape
        if self.library is not None:
            matrix = matrix.float()
        where, form, address = None, Form.UNFOLDED, self.area.data_ptr() + self.used
        if self.library is not None:
            form = self._fold(self.library, matrix, address)
            size = matrix.numel() // 1024 * GROUP_BYTES[form]
        else:
            if self.dtype == torch.int8:
                matrix, scales = rounded(matrix)
                self.scales.append(scales)
                where = scales.data_ptr()
            arranged = self.order.arranged(matrix)
            size = self.dtype.itemsize * matrix.numel()
            self.area[self.used : self.used + size].view(self.dtype).view(arranged.shape).copy_(arranged)
        self.used += size
        self.places.append(Place(address, outputs, inputs, where, form))
        return self.places[-1]

    def last(self) -> Tensor:
        """The matrix [out, in] that was put here last, in its own order, as it was rounded."""
        place = self.places[-1]
        if self.library is not None:
            matrix = torch.empty(place.outputs, place.inputs)
            pointers = ctypes.c_void_p(place.address), ctypes.c_void_p(matrix.data_ptr())
            sizes = (ctypes.c_int64(size) for size in (place.form, place.outputs, place.inputs))
            self.library.forerun_unfold(*sizes, *pointers)
            return matrix
        size = self.dtype.itemsize * place.outputs * place.inputs
        kept = self.area[self.used - size : self.used].view(self.dtype)
        matrix = self.order.restored(kept, place.outputs, place.inputs)
        return matrix * self.scales[-1][:, None] if self.scales else matrix

    def _fold(self, library: ctypes.CDLL, matrix: Tensor, address: int) -> Form:
        pointers = ctypes.c_void_p(matrix.data_ptr()), ctypes.c_void_p(address)
        sizes = (ctypes.c_int64(size) for size in (*matrix.shape, torch.get_num_threads()))
        if self.dtype == torch.int8:
            library.forerun_round(*pointers, *sizes)
            return Form.EIGHTHS
        library.forerun_fold.restype = ctypes.c_int64
        return Form(library.forerun_fold(*pointers, *sizes))


def _stretch(size: int) -> mmap.mmap:
    """Memory of its own: what could be shared, which is what `mmap` gives where nothing else is asked for, has small
    pages on most systems."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area
