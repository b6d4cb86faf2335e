"""Arithmetic that gives the same bits on every device, in every batch and in every order.

A rule's verdict hangs on comparisons. If two devices add up 49,152 probabilities in different orders, the sums differ
in the last bits and, several times in a hundred draws, so does the token (docs/log.md). Hence two rules here: sums are
taken over integers, where order does not matter, and logarithms are made of additions, multiplications and divisions
alone, which IEEE 754 rounds the same way everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.native import choice as native

UNIT = 2.0**50
"""Fixed point: a weight w is counted as floor(w · 2^50). Laws sum to 1, so totals stay far below 2^53,
where float64 still holds every integer. What is lost is under V · 2^-50: 4e-11 for 49,152 tokens."""

_BLOCK = 256
"""Tokens per block when a token is searched in two stages."""

_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52
_SQRT2 = 1.4142135623730951
_LN2 = 0.6931471805599453


def fixed(weights: Tensor) -> Tensor:
    """Non-negative weights as integers. Scaling by a power of two is exact in float32 and float64."""
    return (weights * UNIT).to(torch.int64)


def mass(weights: Tensor) -> Tensor:
    """Σ over the last dimension in float64, the same bits whatever the order of summation."""
    return fixed(weights).sum(-1).to(torch.float64) / UNIT


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """For each row the token at quantile u of the law proportional to `weights`.

    weights [..., V] need not be normalised, but must sum to less than 8, or counts pass 2^53; u [...] is float64
    on [0, 1), at most 1 − 2^-52. The token is the first one whose cumulative weight exceeds u times the total, so a
    token without weight is never drawn, not even at u = 0.
    Blocks of tokens are searched first: no cumulative sum over the whole vocabulary is written.
    """
    vocabulary = weights.shape[-1]
    if weights.dim() == 2 and native.usable(weights):
        return native.draws(weights, u)
    counts = fixed(weights)
    padding = -vocabulary % _BLOCK
    if padding:
        counts = torch.nn.functional.pad(counts, (0, padding))
    blocks = counts.view(*counts.shape[:-1], counts.shape[-1] // _BLOCK, _BLOCK)  # [..., blocks, 256]
    sums = blocks.sum(-1)  # [..., blocks]
    ends = sums.cumsum(-1)
    # Uniforms are at most 1 − 2^-52, so the product stays below the total: the total's last place is worth at
    # most total · 2^-52, and rounding cannot climb over it.
    level = u.to(torch.float64) * ends[..., -1].to(torch.float64)
    block = (ends.to(torch.float64) <= level[..., None]).sum(-1)
    block = block.clamp_max(ends.shape[-1] - 1)  # only a row without any weight gets here
    inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, _BLOCK)).squeeze(-2)
    start = (ends - sums).gather(-1, block[..., None])
    cumulative = start + inside.cumsum(-1)
    token = block * _BLOCK + (cumulative.to(torch.float64) <= level[..., None]).sum(-1)
    return token.clamp_max(vocabulary - 1)


def argmax(scores: Tensor) -> Tensor:
    """The first maximum of each row [..., V], in two stages.

    The maximum of a block is vectorised on a CPU, its index is not; so the index is looked for in one block only.
    """
    vocabulary = scores.shape[-1]
    if vocabulary % _BLOCK:
        scores = torch.nn.functional.pad(scores, (0, -vocabulary % _BLOCK), value=-torch.inf)
    blocks = scores.view(*scores.shape[:-1], scores.shape[-1] // _BLOCK, _BLOCK)
    block = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, _BLOCK)).squeeze(-2)
    return block * _BLOCK + inside.argmax(-1)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers, to about 1e-15 relative.

    x = m · 2^e with m in [√½, √2); with s = (m−1)/(m+1), log m = 2s(1 + s²/3 + s⁴/5 + …).
    """
    bits = x.view(torch.int64)
    exponent = (bits >> 52).sub_(1023)
    mantissa = (bits & _MANTISSA).bitwise_or_(_ONE).view(torch.float64)
    high = mantissa > _SQRT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent += high
    s = (mantissa - 1.0).div_(mantissa.add_(1.0))
    z = s * s
    series = torch.full_like(z, 1 / 21)
    for odd in (19, 17, 15, 13, 11, 9, 7, 5, 3, 1):
        series.mul_(z).add_(1 / odd)
    return series.mul_(s).mul_(2.0).add_(exponent.to(torch.float64).mul_(_LN2))
