"""Attention of packed rows over the paged cache: every row sees its own text and, in a tree, its own path.

Keys and values are written to their slots first and then read back with the context, so a row's own branch is nothing
special. Query heads that share a key head are folded into rows, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.batch import Batch, Group
from forerun.models.storage import Storage


class Attention:
    """The attention of one pass. What its layers share, where keys lie and who sees them, is made once."""

    def __init__(self, batch: Batch, storage: Storage, dtype: torch.dtype) -> None:
        assert storage.whole is not None, "the storage was not made by this model"
        self.batch = batch
        self.dtype = dtype
        self.kv_heads = storage.whole.shape[3]
        self.cached = storage.whole.flatten(2, 3).unbind()  # per layer [slots, 2 · kv_heads, D]
        self.in_place = [_in_place(storage.whole, group) for group in batch.groups]
        self.masks: dict[tuple[int, int | None, int], Tensor] = {}

    def attend(self, layer: int, heads: Tensor, *, window: int | None, scale: float) -> Tensor:
        """heads [R, queries + 2 · kv_heads, D], the queries first, then keys, then values → [R, queries · D]."""
        rows, width, size = heads.shape
        queries = width - 2 * self.kv_heads
        self.cached[layer].index_copy_(0, self.batch.slots, heads[:, queries:])
        q = heads[:, :queries]
        share = queries // self.kv_heads
        mixed: Tensor | None = None
        for index, group in enumerate(self.batch.groups):
            count, height = group.shape
            own = q if group.rows is None else q[group.rows.clamp_max(rows - 1).view(-1)]
            folded = own.view(count, height, self.kv_heads, share, size).permute(0, 2, 3, 1, 4)
            keys, values = self._keys_and_values(layer, index, group)
            out = functional.scaled_dot_product_attention(
                folded.reshape(count, self.kv_heads, share * height, size),
                keys,
                values,
                attn_mask=self._mask(index, group, window, share),
                scale=scale,
            )
            out = out.view(count, self.kv_heads, share, height, size).permute(0, 3, 1, 2, 4).reshape(count * height, -1)
            if group.rows is None:
                return out
            if mixed is None:
                mixed = out.new_empty(rows + 1, out.shape[1])  # the last row takes what padding gives
            mixed.index_copy_(0, group.rows.view(-1), out)
        assert mixed is not None, "a batch has rows"
        return mixed[:rows]

    def _keys_and_values(self, layer: int, index: int, group: Group) -> tuple[Tensor, Tensor]:
        """[G, kv_heads, L, D] each."""
        found = self.in_place[index]
        if found is not None:
            return found[0][layer], found[1][layer]
        copied = self.cached[layer].index_select(0, group.keys.view(-1))
        keys, values = copied.view(*group.keys.shape, 2, self.kv_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        return keys, values

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


def _in_place(whole: Tensor, group: Group) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
    """Keys and values of every layer, each [1, kv_heads, L, D], if they lie in one run and need not be copied."""
    if group.run is None:
        return None
    run = whole[:, None, group.run : group.run + group.keys.shape[1]]
    keys, values = run.permute(3, 0, 1, 4, 2, 5).unbind()
    return keys.unbind(), values.unbind()
