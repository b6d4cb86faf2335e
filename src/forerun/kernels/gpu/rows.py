"""What is done to each row between two products: norms, rotation, the cache, the gate."""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl, wait_for_the_one_before


@jit()
def rounded(x: Value, KIND: constexpr) -> Value:
    """x as a tensor of that kind would hold it, in float32."""
    return x.to(KIND).to(tl.float32)


@jit()
def scaled(x: Value, weight: Value, offset: Value, OFFSET: constexpr, KIND: constexpr) -> Value:
    """Times the weight of a norm. Gemma multiplies in float32, the others after rounding."""
    if OFFSET:
        return rounded(x * (weight + offset), KIND)
    return rounded(rounded(x, KIND) * weight, KIND)


@jit()
def rms_norm(
    x: Value,  # [R, SIZE]; with a residual it becomes the sum
    residual: Value,  # [R, SIZE]
    weight: Value,  # [SIZE]
    out: Value,  # [R, SIZE]
    eps: Value,
    offset: Value,
    x_stride: Value,
    residual_stride: Value,
    out_stride: Value,
    SIZE: constexpr,
    PAD: constexpr,
    ADD: constexpr,
    OFFSET: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PAD)
    inside = dims < SIZE
    kind = x.dtype.element_ty
    value = tl.load(x + row * x_stride + dims, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + dims, mask=inside, other=0.0).to(tl.float32)
        value = rounded(value, kind)
        tl.store(x + row * x_stride + dims, value.to(kind), mask=inside)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    factor = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    value = scaled(value, factor, offset, OFFSET, kind)
    tl.store(out + row * out_stride + dims, value.to(kind), mask=inside)


@jit()
def gated(
    both: Value,  # [R, 2 · SIZE]: gate, then up
    out: Value,  # [R, SIZE]
    both_stride: Value,
    out_stride: Value,
    SIZE: constexpr,
    TILE: constexpr,
    SILU: constexpr,
    OVERLAP: constexpr,
) -> Value:
    wait_for_the_one_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < SIZE
    kind = both.dtype.element_ty
    gate = tl.load(both + row * both_stride + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + SIZE + dims, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:  # (1 + tanh z) / 2 is the logistic function of 2 z
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * out_stride + dims, (rounded(gate, kind) * up).to(kind), mask=inside)


@jit()
def write_and_rotate(
    qkv: Value,  # [R, (HEADS + 2 · KV_HEADS) · SIZE]
    q: Value,  # [R, HEADS, SIZE]
    keys: Value,  # [slots, KV_HEADS, SIZE]
    values: Value,  # [slots, KV_HEADS, SIZE]
    positions: Value,  # [R]
    slots: Value,  # [R]; −1 for none
    cos: Value,  # [max_positions, HALF]
    sin: Value,
    q_weight: Value,  # [SIZE]
    k_weight: Value,
    eps: Value,
    offset: Value,
    qkv_stride: Value,
    keys_stride: Value,
    values_stride: Value,
    cos_stride: Value,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    SIZE: constexpr,
    PAD: constexpr,  # of half a head
    TILE: constexpr,  # heads of a program
    ROTATE: constexpr,
    NORM: constexpr,
    OFFSET: constexpr,
    ROUND: constexpr,
    OVERLAP: constexpr,
) -> Value:
    """A tile holds heads of all three sorts; each is stored where it belongs. The two halves of a head, which turn
    with each other, are two tiles."""
    wait_for_the_one_before(OVERLAP)
    half: constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PAD)
    kind = qkv.dtype.element_ty
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (dims < half)[None, :]
    is_q = inside & (head < HEADS)[:, None]
    is_v = inside & (head >= HEADS + KV_HEADS)[:, None]
    is_k = inside & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    place = qkv + row * qkv_stride + head[:, None] * SIZE + dims[None, :]
    raw_first = tl.load(place, mask=inside, other=0.0)
    raw_second = tl.load(place + half, mask=inside, other=0.0)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        low = dims < half
        of_q = tl.load(q_weight + dims, mask=low, other=0.0).to(tl.float32)[None, :]
        of_k = tl.load(k_weight + dims, mask=low, other=0.0).to(tl.float32)[None, :]
        first = scaled(first * factor, tl.where(is_q, of_q, of_k), offset, OFFSET, kind)
        of_q = tl.load(q_weight + half + dims, mask=low, other=0.0).to(tl.float32)[None, :]
        of_k = tl.load(k_weight + half + dims, mask=low, other=0.0).to(tl.float32)[None, :]
        second = scaled(second * factor, tl.where(is_q, of_q, of_k), offset, OFFSET, kind)
    if ROTATE:
        turn = tl.load(positions + row).to(tl.int64) * cos_stride + dims
        c = tl.load(cos + turn, mask=dims < half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + turn, mask=dims < half, other=0.0).to(tl.float32)[None, :]
        kept = first * c
        other = second * c
        if ROUND:
            kept = rounded(kept, kind)
            other = rounded(other, kind)
        turned = kept - second * s
        second = other + first * s
        first = turned
    out = q + row * (HEADS * SIZE) + head[:, None] * SIZE + dims[None, :]
    tl.store(out, first.to(kind), mask=is_q)
    tl.store(out + half, second.to(kind), mask=is_q)
    slot = tl.load(slots + row).to(tl.int64)
    key = keys + slot * keys_stride + (head - HEADS)[:, None] * SIZE + dims[None, :]
    tl.store(key, first.to(kind), mask=is_k & (slot >= 0))
    tl.store(key + half, second.to(kind), mask=is_k & (slot >= 0))
    value = values + slot * values_stride + (head - HEADS - KV_HEADS)[:, None] * SIZE + dims[None, :]
    tl.store(value, raw_first, mask=is_v & (slot >= 0))
    tl.store(value + half, raw_second, mask=is_v & (slot >= 0))
