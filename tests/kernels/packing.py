"""Random batches: trees, chains, lengths and scattered blocks, as `KVCache` hands them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.attention import PackedRows, mask_words

BLOCK = 16

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Triton's interpreter cuts bfloat16 off where a device rounds."""


@dataclass(frozen=True)
class Case:
    packed: PackedRows
    visible: list[Tensor]  # for each sequence [rows, rows] bool
    slots: list[Tensor]  # for each sequence [context + rows]
    q: Tensor  # [R, heads, D]
    keys: Tensor  # [slots, kv_heads, D]
    values: Tensor

    def to(self, device: torch.device) -> Case:
        fields = {name: t.to(device) for name, t in vars(self.packed).items() if isinstance(t, Tensor)}
        packed = PackedRows(**{**vars(self.packed), **fields})
        return Case(packed, self.visible, self.slots, self.q.to(device), self.keys.to(device), self.values.to(device))


def random_tree(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ancestors [rows, rows], each node its own, and depths [rows]."""
    seen = torch.eye(rows, dtype=torch.bool)
    depths = torch.zeros(rows, dtype=torch.int64)
    for node in range(1, rows):
        parent = int(torch.randint(0, node, (), generator=generator))
        seen[node] |= seen[parent]
        depths[node] = depths[parent] + 1
    return seen, depths


def random_case(
    lengths: list[tuple[int, int]],  # context and rows of each sequence
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    chain: bool = False,
    seed: int = 0,
    spare_rows: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(context + rows) // BLOCK) for context, rows in lengths]
    total = sum(needed) + 3
    order = torch.randperm(total, generator=generator)
    most = max(rows for _, rows in lengths)
    count = sum(rows for _, rows in lengths) + spare_rows
    blocks = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    mask = torch.zeros(count, -(-most // 64), dtype=torch.int64)
    positions = torch.zeros(count, dtype=torch.int64)
    starts, visible, slots = [], [], []
    row = taken = 0
    for b, (context, rows) in enumerate(lengths):
        own = order[taken : taken + needed[b]]
        taken += needed[b]
        blocks[b, : needed[b]] = own
        seen, depths = random_tree(rows, generator)
        if chain:
            seen, depths = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.arange(rows)
        padded = torch.zeros(rows, mask.shape[1] * 64, dtype=torch.bool)
        padded[:, :rows] = seen
        mask[row : row + rows] = mask_words(padded)
        positions[row : row + rows] = context + depths
        visible.append(seen)
        slots.append((own[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)[: context + rows])
        starts.append(row)
        row += rows
    packed = PackedRows(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([rows for _, rows in lengths], dtype=torch.int32),
        torch.tensor([context for context, _ in lengths], dtype=torch.int32),
        torch.tensor([rows for _, rows in lengths], dtype=torch.int32),
        blocks, mask, positions, most, max(context for context, _ in lengths),
    )  # fmt: skip
    keys, values = torch.randn(2, total * BLOCK, kv_heads, size, generator=generator)
    used = torch.zeros(total * BLOCK, dtype=torch.bool)
    used[torch.cat(slots)] = True
    keys[~used] = values[~used] = torch.nan  # what no sequence owns must not matter
    q = torch.randn(count, heads, size, generator=generator)
    return Case(packed, visible, slots, q.to(dtype), keys.to(dtype), values.to(dtype))
