"""Few rows times a large weight: all that counts is how fast the weight is read.

The operands are swapped. A tile of the weight is the left side of the tensor cores' product, where they want 64 rows,
and the rows are the right side, where 16 do: up to 16 rows cost what one costs. A program owns a tile of outputs and
goes along its weight rows in one direction, step by step, whatever the number of rows, and an output is summed in
float32 over the same numbers in the same order. So the bits of a row do not depend on the rows beside it.

A weight does not depend on the kernel before. With OVERLAP a program starts while that kernel still runs, asks for the
beginning of its weight rows, and only then waits (programmatic dependent launch, Hopper and later). What it asks for
comes to the cache of the device, which all writes go through, so that even a weight that is just being written is read
right. Every kernel that is launched so waits before it reads or writes anything, and so the one before the last is over
too.
"""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl
from forerun.kernels.gpu.rows import rounded


@jit()
def gated(gate: Value, up: Value, SILU: constexpr, KIND: constexpr) -> Value:
    """Rounded wherever a product in KIND and `rows.gated` after it round."""
    gate = rounded(gate, KIND)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 is the logistic function of 2 z
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return rounded(gate, KIND) * rounded(up, KIND)


@jit()
def ask(place: Value, COUNT: constexpr) -> Value:
    """Brings COUNT numbers of 16 bits at each place to the cache of the device, and waits for nothing."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [place.to(tl.int64), 2 * COUNT], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit("rows", "steps")
def multiply(
    x: Value,  # [R, depth]
    weight: Value,  # [size, depth]; gated [2 · size, depth]: gate, then up
    bias: Value,  # [size], gated [2 · size]; read only with BIAS
    out: Value,  # [R, size]; with several splits their sums, [splits, R, size] float32, gated [splits, R, 2 · size]
    rows: Value,
    size: Value,
    depth: Value,
    steps: Value,  # of a split
    x_stride: Value,
    weight_stride: Value,
    out_stride: Value,
    ROWS: constexpr,
    TILE_N: constexpr,
    TILE_K: constexpr,
    EVEN: constexpr,  # whether the steps of all splits end where the depth does
    SPLIT: constexpr,  # whether there are several
    BIAS: constexpr,
    GATED: constexpr,
    SILU: constexpr,
    OVERLAP: constexpr,
    PIECES: constexpr,  # of a weight row to ask for before the wait; 0 for none
    PIECE: constexpr,  # their size; a multiple of 8
) -> Value:
    split = tl.program_id(1)
    begin = split * steps * TILE_K
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    own = tl.minimum(n, size - 1).to(tl.int64)  # a tile that sticks out reads its last row again: no masks
    if OVERLAP:
        if PIECES > 0:
            piece = tl.minimum(begin + tl.arange(0, PIECES) * PIECE, depth - PIECE)
            ask(weight + own[:, None] * weight_stride + piece[None, :], PIECE)
            if GATED:
                ask(weight + (own + size)[:, None] * weight_stride + piece[None, :], PIECE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, so that only one kernel runs ahead and fills the cache

    row = tl.arange(0, ROWS)
    real = row < rows
    along = tl.arange(0, TILE_K)
    left = weight + own[:, None] * weight_stride + (begin + along)[None, :]
    left_up = weight + (own + size)[:, None] * weight_stride + (begin + along)[None, :]
    right = x + row[:, None] * x_stride + (begin + along)[None, :]
    total = tl.zeros([TILE_N, ROWS], tl.float32)
    total_up = tl.zeros([TILE_N, ROWS], tl.float32)
    for step in range(steps):
        if EVEN:
            tile = tl.load(left)
            values = tl.load(right, mask=real[:, None], other=0.0)
        else:
            inside = (begin + step * TILE_K + along)[None, :] < depth
            tile = tl.load(left, mask=inside, other=0.0)
            values = tl.load(right, mask=real[:, None] & inside, other=0.0)
        columns = tl.trans(values)
        total = tl.dot(tile, columns, total)
        if GATED:
            tile_up = tl.load(left_up) if EVEN else tl.load(left_up, mask=inside, other=0.0)
            total_up = tl.dot(tile_up, columns, total_up)
            left_up += TILE_K
        left += TILE_K
        right += TILE_K

    kept = (n < size)[:, None] & real[None, :]
    if SPLIT:
        width = 2 * size if GATED else size
        place = out + (split * rows + row).to(tl.int64)[None, :] * width + n[:, None]
        tl.store(place, total, mask=kept)
        if GATED:
            tl.store(place + size, total_up, mask=kept)
    else:
        kind = out.dtype.element_ty
        if BIAS:
            total += tl.load(bias + own).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                total_up += tl.load(bias + size + own).to(tl.float32)[:, None]
            total = gated(total, total_up, SILU, kind)
        tl.store(out + row[None, :] * out_stride + n[:, None], total.to(kind), mask=kept)


@jit()
def added(
    parts: Value, bias: Value, row: Value, rows: Value, width: Value, n: Value, inside: Value,
    SPLITS: constexpr, BIAS: constexpr,
) -> Value:  # fmt: skip
    """The sums of all splits at columns n of a row, the first split first."""
    total = tl.load(parts + row.to(tl.int64) * width + n, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * rows + row).to(tl.int64) * width + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    return total


@jit("rows")
def add_splits(
    parts: Value,  # [SPLITS, R, size] float32; gated [SPLITS, R, 2 · size]
    bias: Value,  # [size], gated [2 · size]
    out: Value,  # [R, size]
    rows: Value,
    size: Value,
    out_stride: Value,
    SPLITS: constexpr,
    TILE: constexpr,
    BIAS: constexpr,
    GATED: constexpr,
    SILU: constexpr,
    OVERLAP: constexpr,
) -> Value:
    row = tl.program_id(0)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = n < size
    kind = out.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # before the wait: what follows may ask for its weight during the product
        tl.extra.cuda.gdc_wait()
    width = 2 * size if GATED else size
    total = added(parts, bias, row, rows, width, n, inside, SPLITS, BIAS)
    if GATED:
        total = gated(total, added(parts, bias, row, rows, width, size + n, inside, SPLITS, BIAS), SILU, kind)
    tl.store(out + row * out_stride + n, total.to(kind), mask=inside)
