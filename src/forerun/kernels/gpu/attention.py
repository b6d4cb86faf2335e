"""Attention over the paged cache with a tree mask, after FlashAttention (Dao et al., 2022) and Flash-Decoding.

A program takes one sequence, one key head, a tile of that head's queries and a share of the context. The queries that
read the same keys (all heads of the group, of all rows) are folded into one dimension: query m of the fold is row
m // SHARE and head m % SHARE. So keys are read once for a whole tree, and the tensor cores get enough rows.

Numbers of rows and lengths are read on the device; only the grid is fixed. Programs beyond a sequence's rows end at
once.
"""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl, wait_for_the_one_before


@jit()
def visit(
    queries: Value,  # [TILE_M, SIZE_PAD]
    keys: Value,
    values: Value,
    slots: Value,  # [TILE_N]
    there: Value,  # [TILE_N]
    visible: Value,  # [TILE_M, TILE_N]
    top: Value,  # [TILE_M] largest score so far
    total: Value,  # [TILE_M] sum of weights so far
    mixed: Value,  # [TILE_M, VALUE_PAD]
    scale: Value,
    keys_stride: Value,
    values_stride: Value,
    SIZE: constexpr,
    SIZE_PAD: constexpr,
    VALUE: constexpr,
    VALUE_PAD: constexpr,
    PRECISION: constexpr,
) -> Value:
    """One tile of keys: the online softmax (Milakov and Gimelshein, 2018) in base 2."""
    dims = tl.arange(0, SIZE_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    places = slots.to(tl.int64)
    key_mask = there[:, None] if SIZE == SIZE_PAD else there[:, None] & (dims < SIZE)[None, :]
    value_mask = there[:, None] if VALUE == VALUE_PAD else there[:, None] & (value_dims < VALUE)[None, :]
    key = tl.load(keys + places[:, None] * keys_stride + dims[None, :], mask=key_mask, other=0.0)
    scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: −∞ − −∞ would be NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    value = tl.load(values + places[:, None] * values_stride + value_dims[None, :], mask=value_mask, other=0.0)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision=PRECISION)
    return higher, total, mixed


@jit("blocks_stride", "words", "total_rows", "tiles", "splits")
def attend(
    q: Value,  # [R, heads, SIZE]
    keys: Value,  # [slots, kv_heads, SIZE]
    values: Value,  # [slots, kv_heads, VALUE]
    blocks: Value,  # [B, max_blocks]
    starts: Value,  # [B]
    counts: Value,  # [B]
    contexts: Value,  # [B]
    tails: Value,  # [B]
    masks: Value,  # [R, words]
    positions: Value,  # [R]; read only with a window
    out: Value,  # [R, heads, VALUE]
    parts: Value,  # [splits, R, heads, VALUE] float32; used only with several splits, like `sums`
    sums: Value,  # [splits, R, heads] log2 of the sum of weights
    scale: Value,  # times log2 e
    q_stride: Value,
    keys_stride: Value,
    values_stride: Value,
    blocks_stride: Value,
    words: Value,
    out_stride: Value,
    total_rows: Value,
    tiles: Value,  # of queries
    splits: Value,  # of the context
    HEADS: constexpr,
    SHARE: constexpr,
    SIZE: constexpr,
    SIZE_PAD: constexpr,
    VALUE: constexpr,
    VALUE_PAD: constexpr,
    BLOCK: constexpr,
    WINDOW: constexpr,  # 0 for none
    TILE_M: constexpr,
    TILE_N: constexpr,  # divides 64, so that a tile of own rows lies in one word of the mask
    SPLIT: constexpr,  # whether there are several
    PRECISION: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    kv_head = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(counts + sequence).to(tl.int32)
    if tile * TILE_M >= count * SHARE:
        return
    start = tl.load(starts + sequence).to(tl.int32)
    context = tl.load(contexts + sequence).to(tl.int32)
    fold = tile * TILE_M + tl.arange(0, TILE_M)
    real = fold < count * SHARE
    row = (start + fold // SHARE).to(tl.int64)
    head = kv_head * SHARE + fold % SHARE
    dims = tl.arange(0, SIZE_PAD)
    queries = tl.load(
        q + row[:, None] * q_stride + head[:, None] * SIZE + dims[None, :],
        mask=real[:, None] & (dims < SIZE)[None, :],
        other=0.0,
    )
    keys += kv_head * SIZE
    values += kv_head * VALUE
    table = blocks + sequence.to(tl.int64) * blocks_stride
    ahead = tl.arange(0, TILE_N)
    top = tl.full([TILE_M], -float("inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    mixed = tl.zeros([TILE_M, VALUE_PAD], tl.float32)

    first = 0
    if WINDOW > 0:
        at_position = tl.load(positions + row, mask=real, other=2**30).to(tl.int32)
        first = tl.maximum(tl.min(at_position, 0) - (WINDOW - 1), 0) // TILE_N * TILE_N
    share = tl.cdiv(tl.cdiv(tl.maximum(context - first, 0), TILE_N), splits) * TILE_N
    begin = first + split * share
    end = tl.minimum(begin + share, context)
    for at in range(begin, end, TILE_N):
        index = at + ahead
        there = index < end
        slots = tl.load(table + index // BLOCK, mask=there, other=0).to(tl.int32) * BLOCK + index % BLOCK
        visible = real[:, None] & there[None, :]
        if WINDOW > 0:
            visible = visible & (at_position[:, None] - index[None, :] < WINDOW)
        top, total, mixed = visit(
            queries, keys, values, slots, there, visible, top, total, mixed,
            scale, keys_stride, values_stride, SIZE, SIZE_PAD, VALUE, VALUE_PAD, PRECISION,
        )  # fmt: skip

    if split == splits - 1:  # whose share of the context is the smallest
        tail = tl.load(tails + sequence).to(tl.int32)
        last = tl.minimum((tile + 1) * TILE_M, count * SHARE) - 1
        for own in range(0, tail - count + last // SHARE + 1, TILE_N):  # no row sees one behind it
            node = own + ahead
            there = node < tail
            index = context + node
            slots = tl.load(table + index // BLOCK, mask=there, other=0).to(tl.int32) * BLOCK + index % BLOCK
            word = tl.load(masks + row * words + own // 64, mask=real, other=0)
            visible = (word[:, None] >> (node % 64).to(tl.int64)[None, :]) & 1 != 0
            visible = visible & there[None, :]
            if WINDOW > 0:
                of_row = node - (tail - count)  # the others are near: the mask alone speaks for them
                lies_at = tl.load(positions + start + of_row, mask=there & (of_row >= 0), other=2**30).to(tl.int32)
                visible = visible & (at_position[:, None] - lies_at[None, :] < WINDOW)
            top, total, mixed = visit(
                queries, keys, values, slots, there, visible, top, total, mixed,
                scale, keys_stride, values_stride, SIZE, SIZE_PAD, VALUE, VALUE_PAD, PRECISION,
            )  # fmt: skip

    value_dims = tl.arange(0, VALUE_PAD)
    kept = real[:, None] & (value_dims < VALUE)[None, :]
    some = total > 0
    total = tl.where(some, total, 1.0)
    mixed = mixed / total[:, None]
    if not SPLIT:
        place = out + row[:, None] * out_stride + head[:, None] * VALUE + value_dims[None, :]
        tl.store(place, mixed.to(out.dtype.element_ty), mask=kept)
    else:
        cell = (split.to(tl.int64) * total_rows + row) * HEADS + head
        tl.store(parts + cell[:, None] * VALUE + value_dims[None, :], mixed, mask=kept)
        tl.store(sums + cell, tl.where(some, top + tl.log2(total), -float("inf")), mask=real)


@jit("total_rows")
def combine(
    parts: Value,  # [SPLITS, R, heads, VALUE] float32
    sums: Value,  # [SPLITS, R, heads]
    starts: Value,
    counts: Value,
    out: Value,  # [R, heads, VALUE]
    out_stride: Value,
    total_rows: Value,
    HEADS: constexpr,
    VALUE: constexpr,
    VALUE_PAD: constexpr,
    SPLITS: constexpr,  # a power of two
    OVERLAP: constexpr,
) -> Value:
    """What the splits of the context give together, weighed by their sums. One program for a row and a head."""
    wait_for_the_one_before(OVERLAP)
    node = tl.program_id(0)
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    if node >= tl.load(counts + sequence).to(tl.int32):
        return
    row = (tl.load(starts + sequence).to(tl.int32) + node).to(tl.int64)
    value_dims = tl.arange(0, VALUE_PAD)
    cell = (tl.arange(0, SPLITS).to(tl.int64) * total_rows + row) * HEADS + head
    logs = tl.load(sums + cell)
    some = logs > -float("inf")
    top = tl.max(logs, 0)
    weights = tl.where(some, tl.exp2(logs - tl.where(top == -float("inf"), 0.0, top)), 0.0)
    mask = some[:, None] & (value_dims < VALUE)[None, :]
    part = tl.load(parts + cell[:, None] * VALUE + value_dims[None, :], mask=mask, other=0.0)
    whole = tl.sum(weights, 0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(
        out + row * out_stride + head * VALUE + value_dims, mixed.to(out.dtype.element_ty), mask=value_dims < VALUE
    )
