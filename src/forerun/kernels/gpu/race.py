"""The race of `core/noise.py`, in one pass over p: the same bits, and none of the noise is written to memory.

Nothing may be contracted here: a product and a sum that are rounded once, where PyTorch rounds twice, are other bits.
It is launched so.
"""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl


@jit()
def mixed(x: Value) -> Value:
    """The output function of SplitMix64, on int64; the masks make the shifts logical ones."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@jit()
def logarithm(x: Value) -> Value:
    """`exact.log`, operation by operation. Constants are made as float64: a bare one may be rounded to float32."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = mantissa > tl.full(x.shape, 1.4142135623730951, tl.float64)
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent += high.to(tl.int64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = tl.full(x.shape, 1 / 21, tl.float64)
    for step in tl.static_range(10):
        series = series * z + tl.full(x.shape, 1 / (19 - 2 * step), tl.float64)
    return (series * s) * 2.0 + exponent.to(tl.float64) * tl.full(x.shape, 0.6931471805599453, tl.float64)


@jit("size")
def race(
    p: Value,  # [R, size]
    keys: Value,  # [R] int64
    scores: Value,  # [R, tiles] float64: the best p / E of a tile
    tokens: Value,  # [R, tiles] int64: the first token that has it
    size: Value,
    stride: Value,
    tiles: Value,
    TILE: constexpr,
) -> Value:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < size
    weight = tl.load(p + row * stride + token, mask=inside, other=0.0).to(tl.float64)
    key = tl.load(keys + row + tl.zeros([TILE], tl.int32))
    bits = (mixed(key + (token.to(tl.int64) + 1) * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    score = tl.where(inside, weight / (0.0 - logarithm(uniform)), -1.0)
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 2147483647), 0)
    place = row * tiles + tile
    tl.store(scores + place, best)
    tl.store(tokens + place, first.to(tl.int64))
