"""Where keys and values lie: one row per token and layer, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.transfer import to_device
from forerun.kernels.kernel import power_of_two
from forerun.kernels.step import USUAL_MOVES, move_rows

Moves = tuple[list[int], list[int]]
"""From which slots to which."""


@dataclass(frozen=True)
class LayerShape:
    """Of what one layer keeps for a token."""

    kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class Storage:
    """Who owns which slot is the business of `KVCache`."""

    keys: list[Tensor]  # per layer [slots, kv_heads, key_size]
    values: list[Tensor]  # per layer [slots, kv_heads, value_size]
    whole: Tensor | None
    """[layers, slots, 2, kv_heads, size] where layers, keys and values are all of one shape; `keys` and `values` are
    views of it then."""

    @classmethod
    def make(cls, layers: list[LayerShape], slots: int, dtype: torch.dtype, device: torch.device | str) -> Storage:
        """Zeros, not whatever was in memory: a masked entry has weight 0, and 0 · NaN would be NaN."""
        first = layers[0]
        if all(layer == first for layer in layers) and first.key_size == first.value_size:
            shape = (len(layers), slots, 2, first.kv_heads, first.key_size)
            whole = torch.zeros(shape, dtype=dtype, device=device)
            return cls(list(whole[:, :, 0].unbind()), list(whole[:, :, 1].unbind()), whole)
        keys = [torch.zeros(slots, layer.kv_heads, layer.key_size, dtype=dtype, device=device) for layer in layers]
        values = [torch.zeros(slots, layer.kv_heads, layer.value_size, dtype=dtype, device=device) for layer in layers]
        return cls(keys, values, None)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def bytes_per_slot(self) -> int:
        return sum(t[0].numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """slots [R], keys and values [R, kv_heads, size]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, texts: Many[Moves]) -> None:
        """Copy slots over others, in every layer. What one text writes is not another's; of its own slots it may read
        and write the same. A device moves each text's rows by themselves, of all texts at once."""
        if self.whole is not None and self.whole.is_cuda:
            move_rows(self.whole, *to_device(padded(texts), self.whole.device))
            return
        source, target = (
            torch.tensor([slot for side in sides for slot in side], device=self.keys[0].device)
            for sides in zip(*texts, strict=True)
        )
        if self.whole is not None:
            self.whole.index_copy_(1, target, self.whole.index_select(1, source))
            return
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def padded(texts: Many[Moves]) -> list[list[list[int]]]:
    """[2, texts, moves] with −1 for none. The numbers of moves are few, for each is a kernel of its own."""
    width = max(USUAL_MOVES, power_of_two(max(len(source) for source, _ in texts)))
    return [[each + [-1] * (width - len(each)) for each in side] for side in zip(*texts, strict=True)]
