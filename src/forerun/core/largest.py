"""The largest entries of long rows, in two stages on a CPU, where one pass over a vocabulary costs most."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.native import choice as native

_BLOCK = 64


def largest(scores: Tensor, count: int, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of scores [R, V], largest first, and where they are; ties in any order. `peaks`
    [R, V / B] are the largest of each B entries, where they are known.

    The `count` blocks with the largest maxima hold them all: another block's maximum is no larger than any of theirs.
    """
    rows, size = scores.shape
    block = _BLOCK if peaks is None else size // peaks.shape[1]
    if scores.device.type != "cpu" or size % block or size < 8 * block * count:
        values, places = scores.topk(min(count, size), -1)
        return values, places
    plain = scores.dtype in (torch.float32, torch.bfloat16)
    if peaks is not None and plain and 0 < count <= 64 and native.library() is not None:
        return native.largest(scores, count, peaks)
    blocks = scores.view(rows, -1, block)
    best = (blocks.amax(-1) if peaks is None else peaks).topk(count, -1).indices  # [R, count]
    candidates = blocks.gather(1, best[..., None].expand(-1, -1, block)).flatten(1)
    values, inside = candidates.topk(count, -1)
    return values, best.gather(1, inside // block) * block + inside % block


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
