"""The largest entries of long rows, in two stages on a CPU, where one pass over a vocabulary costs most."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of scores [R, V], largest first, and where they are; ties in any order.

    The `count` blocks with the largest maxima hold them all: another block's maximum is no larger than any of theirs.
    """
    rows, size = scores.shape
    if scores.device.type != "cpu" or size % _BLOCK or size < 8 * _BLOCK * count:
        values, places = scores.topk(min(count, size), -1)
        return values, places
    blocks = scores.view(rows, -1, _BLOCK)
    best = blocks.amax(-1).topk(count, -1).indices  # [R, count]
    candidates = blocks.gather(1, best[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    values, inside = candidates.topk(count, -1)
    return values, best.gather(1, inside // _BLOCK) * _BLOCK + inside % _BLOCK


def above(values: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries of `values` [R, V] above `least` [R, 1], in order.

    On a CPU a search for entries costs far more than the maximum of a block, so only blocks that hold one are searched.
    """
    size = values.shape[1]
    if size % _BLOCK:
        values = torch.nn.functional.pad(values, (0, -size % _BLOCK), value=-torch.inf)
    blocks = values.view(values.shape[0], -1, _BLOCK)
    row, block = (blocks.amax(-1) > least).nonzero(as_tuple=True)
    found, place = (blocks[row, block] > least[row]).nonzero(as_tuple=True)
    return row[found], block[found] * _BLOCK + place
