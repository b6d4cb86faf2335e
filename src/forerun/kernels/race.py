"""Who arrives first in a race of tokens: the form for an accelerator. What a race is, `core/noise.py` says, and its
plain form is there."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1024


def race_on_device(p: Tensor, keys: Tensor) -> Tensor:
    """[R] argmax p / exponential(keys) for p [R, V] and keys [R]."""
    from forerun.kernels.gpu import race as gpu

    rows, size = p.shape
    tiles = -(-size // TILE)
    assert p.stride(1) == 1
    keys = keys.contiguous()
    scores = torch.empty(rows, tiles, dtype=torch.float64, device=p.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int64, device=p.device)
    if rows:
        gpu.race[(rows, tiles)](
            p, keys, scores, tokens, size, p.stride(0), tiles, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
    return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]
