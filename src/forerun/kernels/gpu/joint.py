"""A row's few keys of its own, joined to what it found in a text that all rows share.

A program takes some rows and the queries that share one head of keys. Everything is computed in float32.
"""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl


@jit()
def places(
    rows: Value, length: Value, HEADS: constexpr, GROUP: constexpr, PAD: constexpr, SIZE: constexpr, ROWS: constexpr
) -> Value:
    """What a program takes: its rows, its head of keys, a head's dimensions; which rows and which of their queries
    there are; and where queries and their logarithms lie."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    kv = tl.program_id(1)
    group = tl.arange(0, PAD)
    head = kv * GROUP + group
    d = tl.arange(0, SIZE)
    there = (row < rows)[:, None] & (group < GROUP)[None, :]
    own = (row < rows)[:, None]
    place = (row[:, None, None] * HEADS + head[None, :, None]) * SIZE + d[None, None, :]
    log_place = ((row // length)[:, None] * HEADS + head[None, :]) * length + (row % length)[:, None]
    return row, kv, d, own, there, place, log_place


@jit("rows", "length")
def join(
    q: Value,  # [rows, HEADS, SIZE]
    own_k: Value,  # [rows, STEPS, HEADS / GROUP, SIZE]
    own_v: Value,
    text: Value,  # [rows, HEADS, SIZE]: what was found in the text
    text_log: Value,  # [rows / length, HEADS, length]: the logarithm of the sum of its weights
    out: Value,  # [rows, HEADS, SIZE]
    out_log: Value,  # as text_log, of text and own keys together
    rows: Value,
    length: Value,
    scale: Value,
    HEADS: constexpr,
    GROUP: constexpr,
    PAD: constexpr,
    SIZE: constexpr,
    STEPS: constexpr,
    ROWS: constexpr,
) -> Value:
    row, kv, d, own, there, place, log_place = places(rows, length, HEADS, GROUP, PAD, SIZE, ROWS)
    wide = there[:, :, None]
    queries = tl.load(q + place, mask=wide, other=0.0).to(tl.float32)
    best = tl.load(text_log + log_place, mask=there, other=0.0)
    total = tl.full([ROWS, PAD], 1.0, tl.float32)
    found = tl.load(text + place, mask=wide, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        key_place = ((row * STEPS + step) * (HEADS // GROUP) + kv)[:, None] * SIZE + d[None, :]
        key = tl.load(own_k + key_place, mask=own, other=0.0).to(tl.float32)
        value = tl.load(own_v + key_place, mask=own, other=0.0).to(tl.float32)
        score = tl.sum(queries * key[:, None, :], 2) * scale
        higher = tl.maximum(best, score)
        before = tl.exp(best - higher)
        weight = tl.exp(score - higher)
        found = found * before[:, :, None] + weight[:, :, None] * value[:, None, :]
        total = total * before + weight
        best = higher
    tl.store(out + place, (found / total[:, :, None]).to(out.dtype.element_ty), mask=wide)
    tl.store(out_log + log_place, best + tl.log(total), mask=there)


@jit("rows", "length")
def part(
    q: Value,
    own_k: Value,
    own_v: Value,
    out: Value,  # what `join` gave
    out_log: Value,
    of_out: Value,  # the gradient of it
    of_q: Value,  # [rows, HEADS, SIZE]: what the text gives of the gradient; to it is added
    of_k: Value,  # as own_k
    of_v: Value,
    rows: Value,
    length: Value,
    scale: Value,
    HEADS: constexpr,
    GROUP: constexpr,
    PAD: constexpr,
    SIZE: constexpr,
    STEPS: constexpr,
    ROWS: constexpr,
) -> Value:
    """The gradients of `join`, by the weights that all keys have together."""
    row, kv, d, own, there, place, log_place = places(rows, length, HEADS, GROUP, PAD, SIZE, ROWS)
    wide = there[:, :, None]
    queries = tl.load(q + place, mask=wide, other=0.0).to(tl.float32)
    log = tl.load(out_log + log_place, mask=there, other=0.0)
    given = tl.load(of_out + place, mask=wide, other=0.0).to(tl.float32)
    mean = tl.sum(given * tl.load(out + place, mask=wide, other=0.0).to(tl.float32), 2)
    of_queries = tl.load(of_q + place, mask=wide, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        key_place = ((row * STEPS + step) * (HEADS // GROUP) + kv)[:, None] * SIZE + d[None, :]
        key = tl.load(own_k + key_place, mask=own, other=0.0).to(tl.float32)
        value = tl.load(own_v + key_place, mask=own, other=0.0).to(tl.float32)
        score = tl.sum(queries * key[:, None, :], 2) * scale
        weight = tl.where(there, tl.exp(score - log), 0.0)
        of_score = weight * (tl.sum(given * value[:, None, :], 2) - mean) * scale
        of_queries += of_score[:, :, None] * key[:, None, :]
        of_key = tl.sum(of_score[:, :, None] * queries, 1)
        of_value = tl.sum(weight[:, :, None] * given, 1)
        tl.store(of_k + key_place, of_key.to(of_k.dtype.element_ty), mask=own)
        tl.store(of_v + key_place, of_value.to(of_v.dtype.element_ty), mask=own)
    tl.store(of_q + place, of_queries.to(of_q.dtype.element_ty), mask=wide)
