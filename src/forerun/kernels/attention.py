"""Attention of packed rows over the paged cache, each row seeing its context and its own path of the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.kernel import Kernel, ahead, power_of_two

WORD = 64
"""Bits of one word of a mask."""


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of B sequences lie and what they see. All tensors are on the device and keep their shapes, so that
    a captured pass serves every batch of its bucket; the bounds are the bucket's.

    All are integers, of 32 or 64 bits. A sequence without rows is padding. So is a row of no sequence: nothing is
    computed for it.
    """

    starts: Tensor  # [B] its first row
    counts: Tensor  # [B] its rows
    contexts: Tensor  # [B] tokens of the text in the cache, which every row sees
    tails: Tensor  # [B] keys behind them that the mask is about; the rows themselves are the last of these
    blocks: Tensor  # [B, max_blocks] blocks of slots, of the context and, right behind it, of the tail
    mask: Tensor  # [R, words] int64: bit j of row i: it sees key j of its sequence's tail, never a row behind itself
    positions: Tensor  # [R] absolute positions; the context lies at positions 0, 1, …
    max_rows: int
    max_context: int
    block_size: int = 16


@dataclass(frozen=True)
class Plan:
    """How the work is cut. Any plan gives the same result up to rounding."""

    tile_m: int  # queries (rows × heads of a group) of a program
    tile_n: int  # keys of a step; divides 64
    splits: int  # of the context; a power of two
    warps: int
    stages: int

    @classmethod
    def choose(cls, batch: int, kv_heads: int, queries: int, max_context: int, size: int, processors: int) -> Plan:
        """`queries` for each key head and sequence. Splits fill the device twice, and get four steps each at least. The
        rest is what measured best on an H200 (docs/log.md): few warps where there are many programs."""
        tile_m = min(128, max(16, power_of_two(queries)))
        if queries > 256:  # prompts, and beside them texts of one row
            tile_m = 64
        tile_n = 64 if size <= 128 else 32
        programs = batch * kv_heads * -(-queries // tile_m)
        useful = max(1, max_context // (4 * tile_n))
        wanted = -(-2 * processors // programs)
        if tile_m > 16 and programs >= processors:
            wanted = 1  # putting parts together costs more than it gains
        splits = 1 << (min(useful, wanted, 64).bit_length() - 1)
        warps = 8 if tile_m >= 128 else 4
        if tile_m == 16 and programs * splits > processors:
            warps = 2 if programs * splits > 2 * processors else 8
        return cls(tile_m, tile_n, splits, warps, stages=2 if size > 128 or tile_m == 16 else 3)


def mask_words(visible: Tensor) -> Tensor:
    """visible [..., N] bool → [..., ⌈N / 64⌉] int64: entry j is bit j % 64 of word j // 64."""
    size = visible.shape[-1]
    words = max(1, -(-size // WORD))
    bits = functional.pad(visible, (0, words * WORD - size)).to(torch.int64).view(*visible.shape[:-1], words, WORD)
    return (bits << torch.arange(WORD, device=visible.device)).sum(-1)


def _plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: PackedRows,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """q [R, heads, D]; keys [slots, kv_heads, D] and values [slots, kv_heads, Dv] of one layer → [R, heads · Dv].

    The rows' own keys and values are in the cache already. With a window, a row sees keys less than `window` positions
    back; nodes of a tree that earlier passes read, at the beginning of a tail, count as near. Rows of no sequence keep
    what `out` held, and are zero where none is given. `plan` is for tuning.
    """
    rows, heads = q.shape[:2]
    out = q.new_zeros(rows, heads * values.shape[2]) if out is None else out
    columns = (packed.starts, packed.counts, packed.contexts, packed.tails)
    for b, (start, count, context, tail) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if not count:
            continue
        index = torch.arange(context + tail, device=q.device)
        slots = packed.blocks[b].long()[index // packed.block_size] * packed.block_size + index % packed.block_size
        words = packed.mask[start : start + count]
        own = index[context:] - context
        seen = torch.ones(count, context + tail, dtype=torch.bool, device=q.device)
        seen[:, context:] = words[:, own // WORD] >> (own % WORD) & 1 != 0
        if window is not None:
            at = packed.positions[start : start + count]
            lies_at = torch.cat([index[:context], torch.full_like(index[count:tail], 2**30), at])
            seen &= at[:, None] - lies_at[None] < window
        query = q[start : start + count].float().view(count, keys.shape[1], -1, q.shape[2])
        scores = torch.einsum("rgsd,kgd->gsrk", query, keys[slots].float()) * scale
        weights = torch.softmax(scores.masked_fill_(~seen, -torch.inf), -1).nan_to_num_(0.0)  # a row that sees nothing
        out[start : start + count] = (
            torch.einsum("gsrk,kgd->rgsd", weights, values[slots].float()).flatten(1).to(q.dtype)
        )
    return out


def _device(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: PackedRows,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    from forerun.kernels.gpu import attention as gpu

    rows, heads, size = q.shape
    kv_heads, value = values.shape[1:]
    share, batch = heads // kv_heads, packed.starts.shape[0]
    assert q.stride()[1:] == (size, 1), "queries are packed head by head"
    assert keys.stride()[1:] == (size, 1), "a slot's keys lie together"
    assert values.stride()[1:] == (value, 1), "a slot's values lie together"
    assert packed.mask.is_contiguous()
    assert packed.blocks.stride(1) == 1
    queries = packed.max_rows * share
    if plan is None:
        plan = Plan.choose(batch, kv_heads, queries, packed.max_context, max(size, value), _processors(q.device))
    tiles = -(-queries // plan.tile_m)
    out = q.new_zeros(rows, heads * value) if out is None else out
    parts = sums = out  # not looked at where there is one split
    if plan.splits > 1:
        parts = torch.empty(plan.splits, rows, heads, value, dtype=torch.float32, device=q.device)
        sums = torch.empty(plan.splits, rows, heads, dtype=torch.float32, device=q.device)
    gpu.attend[(kv_heads * tiles, batch, plan.splits)](
        q, keys, values, packed.blocks, packed.starts, packed.counts, packed.contexts, packed.tails, packed.mask,
        packed.positions,
        out, parts, sums, scale * math.log2(math.e),
        q.stride(0), keys.stride(0), values.stride(0), packed.blocks.stride(0), packed.mask.stride(0), out.stride(0),
        rows, tiles, plan.splits, HEADS=heads, SHARE=share,
        SIZE=size, SIZE_PAD=_tile(size), VALUE=value, VALUE_PAD=_tile(value),
        BLOCK=packed.block_size, WINDOW=window or 0, TILE_M=plan.tile_m, TILE_N=plan.tile_n,
        SPLIT=plan.splits > 1, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=plan.warps, num_stages=plan.stages, **ahead(q.device),
    )  # fmt: skip
    if plan.splits > 1:
        gpu.combine[(packed.max_rows, batch, heads)](
            parts, sums, packed.starts, packed.counts, out, out.stride(0), rows,
            HEADS=heads, VALUE=value, VALUE_PAD=_tile(value), SPLITS=plan.splits,
            num_warps=1 if plan.splits <= 8 else 4, **ahead(q.device),
        )  # fmt: skip
    return out


def _tile(size: int) -> int:
    """The tensor cores take 16 at least."""
    return max(16, power_of_two(size))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


tree_attention = Kernel("tree_attention", _device, _plain)
