"""Placing a small linear map inside a large one: which rows and columns of the large matrix hold the small one's, which
must be zero, and which may hold anything because nothing reads what they make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

POOL = 1 << 20
"""Random numbers that are drawn; all noise is cut from these."""


@dataclass(frozen=True)
class Axis:
    """One side of a wide matrix. A place is *taken* by one of the small side, or *free*, or it holds zeros."""

    source: Tensor  # [wide] int64: which place of the small side; counts where `taken`
    taken: Tensor  # [wide] bool
    free: Tensor  # [wide] bool

    @classmethod
    def of(cls, entries: Sequence[int | None], free: Sequence[bool] | None = None) -> Axis:
        """`entries` has a place of the small side, or None, for each of the wide one. `free` says of the places without
        one whether they may hold anything; by default they may."""
        taken = torch.tensor([entry is not None for entry in entries])
        loose = ~taken if free is None else torch.tensor(free) & ~taken
        return cls(torch.tensor([entry or 0 for entry in entries]), taken, loose)

    @classmethod
    def first(cls, small: int, wide: int) -> Axis:
        """The small side, then free places."""
        return cls.of([index if index < small else None for index in range(wide)])

    @property
    def size(self) -> int:
        return self.source.shape[0]

    def closed(self) -> Axis:
        """With zeros where it was free: for what writes there, or for what would read there."""
        return replace(self, free=torch.zeros_like(self.free))

    def repeated(self, times: int) -> Axis:
        """The whole side several times over, for what reads several such vectors one behind another."""
        small = int(self.taken.sum())
        return Axis(
            torch.cat([self.source + small * number for number in range(times)]),
            self.taken.repeat(times),
            self.free.repeat(times),
        )

    def places(self) -> Tensor:
        """[small] of the wide side, in its order."""
        return self.taken.nonzero()[:, 0]


class Noise:
    """Numbers that do not matter, and look like weights: the same on every device. Each row is a piece of one long
    sequence of normal numbers from a random place on, so that billions of them cost a copy."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL, generator=self._generator).to(device)
        self.dtype, self.device = dtype, torch.device(device)

    def block(self, rows: int, columns: int, spread: float) -> Tensor:
        """[rows, columns] with the standard deviation `spread`."""
        assert columns < POOL, "draw more numbers"
        starts = torch.randint(POOL - columns, (rows,), generator=self._generator).to(self.device)
        return (self._pool * spread).to(self.dtype).unfold(0, columns, 1)[starts]


def widen_matrix(matrix: Tensor, rows: Axis, columns: Axis, noise: Noise, scale: float = 1.0) -> Tensor:
    """`matrix` times `scale` where a row and a column are taken. A free row is noise, and so is a free column of a
    taken row, of the size that the matrix's own numbers have; the rest is zero. Computed in float32 and rounded once.
    """
    small = matrix.to(noise.device, torch.float32) * scale
    if bool(rows.free.any()) or bool(columns.free.any()):
        wide = noise.block(rows.size, columns.size, float(small.square().mean().sqrt()))
        for axis, side in ((rows, 0), (columns, 1)):
            shut = (~(axis.taken | axis.free)).nonzero()[:, 0]
            wide.index_fill_(side, shut.to(noise.device), 0)
    else:
        wide = torch.zeros(rows.size, columns.size, dtype=noise.dtype, device=noise.device)
    down, across = rows.places(), columns.places()
    chosen = small[rows.source[down].to(noise.device)][:, columns.source[across].to(noise.device)]
    wide[down.to(noise.device)[:, None], across.to(noise.device)] = chosen.to(noise.dtype)
    return wide


def widen_vector(vector: Tensor, axis: Axis, noise: Noise, scale: float = 1.0, spare: float = 0.0) -> Tensor:
    """`vector` times `scale` where a place is taken, and `spare` elsewhere."""
    small = vector.to(noise.device, torch.float32) * scale
    wide = torch.full((axis.size,), spare, dtype=noise.dtype, device=noise.device)
    places = axis.places()
    wide[places.to(noise.device)] = small[axis.source[places].to(noise.device)].to(noise.dtype)
    return wide
