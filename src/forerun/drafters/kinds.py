"""What rows cost where a target runs: one amount of drafts does not suit all."""

from __future__ import annotations

import torch

from forerun.models.native.floats import rows_are_cheap
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer

NARROW_FLOATS, WIDE_FLOATS = "cpu float32", "cpu float32 in 512 bits"
FLOATS = WIDE_FLOATS if rows_are_cheap() else NARROW_FLOATS
"""A processor without matrix units, or a model that does not use them: there rows cost, more or less."""
FOLDED = "cpu float32, folded"
"""There so little is to be read that a single row takes less than half as long, and every other one costs."""

CHEAP_NODES, MANY_NODES = 15, 63
NODES = {
    FOLDED: 2,
    NARROW_FLOATS: 5,
    WIDE_FLOATS: CHEAP_NODES,
    "cpu": CHEAP_NODES,
}


def kind_of(target: TargetModel) -> str:
    """Of the device as it runs this target."""
    kind = target.device.type
    if kind != "cpu" or target.dtype != torch.float32:
        return kind
    return FOLDED if isinstance(target, Transformer) and target.folded else FLOATS


def cheap_nodes(target: TargetModel) -> int:
    """Those of a tree whose check costs little more than a single row's: with the root 64 rows on an accelerator, 16 on
    a CPU with matrix units or vectors of 512 bits, 6 on others, 3 where little is read (docs/log.md)."""
    return NODES.get(kind_of(target), MANY_NODES)
