"""Weights that learn as they will be stored.

In few bits a matrix is not what was learned. So each step's gradient is that of the rounded weights, and moves the
ones behind them (the straight-through estimate): what rounding takes away is made up for by what else learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from forerun.models.heads.files import BLOCK, LEVELS, as_stored


class Rounding:
    def __init__(self, module: nn.Module, bits: int) -> None:
        """Of the matrices of `module` that learn; none with 16 bits."""
        learning = [weight for weight in module.parameters() if weight.requires_grad and weight.dim() == 2]
        self.bits, self.weights = bits, learning if bits in LEVELS else []
        self.kept = [torch.empty_like(weight) for weight in self.weights]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Rounded within, as they were behind it; in place, so a captured step sees it too."""
        if not self.weights:
            yield
            return
        weights = [weight.detach() for weight in self.weights]
        torch._foreach_copy_(self.kept, weights)
        torch._foreach_copy_(weights, self._rounded(weights))
        try:
            yield
        finally:
            torch._foreach_copy_(weights, self.kept)

    def _rounded(self, weights: list[Tensor]) -> list[Tensor]:
        """Matrices of whole blocks together: each block is rounded by itself, and a launch for each would cost more."""
        made = {number: as_stored(w, self.bits) for number, w in enumerate(weights) if w.shape[1] % BLOCK}
        whole = [w for w in weights if not w.shape[1] % BLOCK]
        if whole:
            rows = as_stored(torch.cat([w.reshape(-1, BLOCK) for w in whole]), self.bits)
            parts = iter(torch.split(rows, [w.numel() // BLOCK for w in whole]))
            made |= {n: next(parts).view(w.shape) for n, w in enumerate(weights) if not w.shape[1] % BLOCK}
        return [made[number] for number in range(len(weights))]
