"""How far the drafter's laws are from the target's, and the gradient: logits are read twice, the second time from a
cache if it is large enough, and nothing of their size is written but the gradient."""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl


@jit()
def normaliser(row: Value, size: Value, TILE: constexpr) -> Value:
    """Of one row of logits: the largest, log Σ exp(logit − largest), and the first token that has the largest.
    The online softmax (Milakov and Gimelshein, 2018)."""
    top = -float("inf")
    total = 0.0
    first = 0
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(row + token, mask=token < size, other=-float("inf"))
        best = tl.max(logit, 0)
        found = tl.min(tl.where(logit == best, token, 2147483647), 0)
        first = tl.where(best > top, found, first)
        higher = tl.maximum(top, best)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logit - higher), 0)
        top = higher
    return top, tl.log(total), first


@jit()
def normal(
    target: Value,  # [w, size]
    tops: Value,  # [w]
    logs: Value,  # [w]
    tokens: Value,  # [w] int32
    size: Value,
    TILE: constexpr,
) -> Value:
    """What all steps of a place need to know of the target's law there."""
    place = tl.program_id(0).to(tl.int64)
    top, log, first = normaliser(target + place * size, size, TILE)
    tl.store(tops + place, top)
    tl.store(logs + place, log)
    tl.store(tokens + place, first)


@jit("pairs", "steps")
def laws_apart(
    scores: Value,  # [w, steps, size]
    target: Value,  # [w, size]
    weights: Value,  # [w, steps]
    labels: Value,  # [w] int64; read only if HARD
    tops: Value,  # [w] of the target, as `normal` leaves them
    logs: Value,  # [w]
    tokens: Value,  # [w]
    figures: Value,  # [3, w, steps]
    gradient: Value,  # [w, steps, size]
    soft: Value,
    size: Value,
    pairs: Value,  # w · steps
    steps: Value,
    TILE: constexpr,
    HARD: constexpr,
) -> Value:
    """A program takes one step of one place. Those of a place come one after another, so that its target's logits are
    read from memory once."""
    pair = tl.program_id(0).to(tl.int64)
    place = pair // steps
    scores += pair * size
    target += place * size
    gradient += pair * size
    kind = gradient.dtype.element_ty
    weight = tl.load(weights + pair)
    target_top = tl.load(tops + place)
    target_log = tl.load(logs + place)
    mass = 1.0
    if HARD:
        label = tl.load(labels + place)
        mass = tl.where(label >= 0, 1.0, soft)
    top, log, first = normaliser(scores, size, TILE)
    apart = tl.zeros([TILE], tl.float32)
    overlap = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < size
        log_p = (tl.load(target + token, mask=inside, other=0.0) - target_top) - target_log
        log_q = (tl.load(scores + token, mask=inside, other=0.0) - top) - log
        p = tl.where(inside, tl.exp(log_p), 0.0)
        q = tl.where(inside, tl.exp(log_q), 0.0)
        overlap += tl.minimum(p, q)
        aim = p
        log_aim = log_p
        if HARD:
            aim = soft * p + tl.where(token == label, 1.0 - soft, 0.0)
            log_aim = tl.log(tl.where(aim > 0.0, aim, 1.0))
        apart += tl.where(aim > 0.0, aim * (log_aim - log_q), 0.0)  # 0 · log 0 = 0
        tl.store(gradient + token, (weight * (mass * q - aim)).to(kind), mask=inside)
    counted = tl.where(weight > 0.0, 1.0, 0.0)
    agreed = tl.where(first == tl.load(tokens + place), 1.0, 0.0)
    tl.store(figures + pair, weight * tl.sum(apart, 0))
    tl.store(figures + pairs + pair, counted * agreed)
    tl.store(figures + 2 * pairs + pair, counted * tl.sum(overlap, 0))
