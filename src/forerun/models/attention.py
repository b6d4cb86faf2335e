"""Attention of packed rows over the paged cache: every row sees its own text and, in a tree, its own path.

Keys and values are written to their slots first and then read back with the context, so a row's own branch is nothing
special. Query heads that share a key head are folded into rows, so keys are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.batch import Batch, Group
from forerun.models.storage import Storage


@dataclass(frozen=True)
class Attention:
    """The attention of one pass. What layers share, the masks, is made once for each window size."""

    batch: Batch
    storage: Storage
    dtype: torch.dtype
    masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        """q [R, heads, D], k and v [R, kv_heads, D] → [R, heads · D]."""
        self.storage.write(layer, self.batch.slots, k, v)
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        rows, heads, size = q.shape
        share = heads // k.shape[1]
        mixed = q.new_empty(rows + 1, heads * v.shape[2])  # the last row takes what padding gives
        for index, group in enumerate(self.batch.groups):
            count, height = group.shape
            own = q if group.rows is None else q[group.rows.clamp_max(rows - 1).view(-1)]
            folded = own.view(count, height, k.shape[1], share, size).permute(0, 2, 3, 1, 4)
            out = functional.scaled_dot_product_attention(
                folded.reshape(count, k.shape[1], share * height, size),
                _gather(keys, group.keys),
                _gather(values, group.keys),
                attn_mask=self._mask(index, group, window, share),
                scale=scale,
            )
            out = out.view(count, k.shape[1], share, height, -1).permute(0, 3, 1, 2, 4).reshape(count * height, -1)
            if group.rows is None:
                return out
            mixed.index_copy_(0, group.rows.view(-1), out)
        return mixed[:rows]

    def _mask(self, index: int, group: Group, window: int | None, share: int) -> Tensor:
        """[G, 1, share · N, L]: 0 where a query may look, −∞ elsewhere."""
        key = (index, window, share)
        if key not in self.masks:
            visible = group.visible
            if window is not None:
                visible = visible & (group.distance < window)
            mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
            self.masks[key] = mask[:, None].repeat(1, 1, share, 1)
        return self.masks[key]


def _gather(rows: Tensor, slots: Tensor) -> Tensor:
    """[slots, heads, D] and [G, L] → [G, heads, L, D]."""
    return rows.index_select(0, slots.view(-1)).view(*slots.shape, *rows.shape[1:]).transpose(1, 2)
