"""Rows that come in parts times a matrix that reads them side by side, in one call (`forerun_join` in `amx.c`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.models.native import amx
from forerun.models.native.in_c import TILE_ROWS
from forerun.models.native.shelf import TILES, Shelf


class Join:
    """Its weights stay in bfloat16: those for one part are often much smaller than those for another."""

    def __init__(self, matrix: Tensor, parts: int) -> None:
        """matrix [out, parts · in], all multiples of 32."""
        found = amx.library()
        assert found is not None
        self.call = found.forerun_join
        self.call.restype = None
        self.outputs, self.inputs, self.parts = matrix.shape[0], matrix.shape[1] // parts, parts
        self.shelf = Shelf(matrix.numel(), TILES, torch.bfloat16)
        self.matrix = self.shelf.put(matrix.bfloat16()).address

    def __call__(self, parts: list[Tensor]) -> Tensor:
        """[R, in] each → [R, out]"""
        rows = [part.bfloat16().contiguous() for part in parts]
        count = rows[0].shape[0]
        assert len(rows) == self.parts
        assert all(part.shape == (count, self.inputs) for part in rows)
        out = torch.zeros(count, self.outputs, dtype=torch.bfloat16)
        height = -(-count // TILE_ROWS) * TILE_ROWS
        tiles = out.new_empty(height, self.parts * self.inputs)
        addresses = (ctypes.c_void_p * self.parts)(*(part.data_ptr() for part in rows))
        sizes = (ctypes.c_int64(size) for size in (self.parts, count, self.inputs))
        self.call(
            *(addresses, *sizes, ctypes.c_void_p(self.matrix), ctypes.c_int64(self.outputs)),
            *(ctypes.c_void_p(tiles.data_ptr()), ctypes.c_void_p(out.data_ptr())),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return out
