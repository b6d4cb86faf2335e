"""Down a draft tree along the tokens that the target takes."""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl, wait_for_the_one_before


@jit("size")
def walk(
    tokens: Value,  # [B, size]
    parents: Value,  # [B, size]
    chosen: Value,  # [B, size] what the target takes behind each node
    active: Value,  # [B]
    nodes: Value,  # [B, STEPS] the nodes on the way
    taken: Value,  # [B, STEPS]
    counts: Value,  # [B]
    refused: Value,  # [B]
    size: Value,
    PAD: constexpr,
    STEPS: constexpr,
    OVERLAP: constexpr,
) -> Value:
    """One program takes a text."""
    wait_for_the_one_before(OVERLAP)
    text = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PAD)
    inside = node < size
    token = tl.load(tokens + text * size + node, mask=inside, other=-2)
    parent = tl.load(parents + text * size + node, mask=inside, other=-2)
    going = tl.load(active + text) > 0
    at = text * 0
    count = text * 0
    left = text * 0
    for step in range(STEPS):
        picked = tl.load(chosen + text * size + at)
        tl.store(nodes + text * STEPS + step, tl.where(going, at, -1))
        tl.store(taken + text * STEPS + step, tl.where(going, picked, 0))
        count += going.to(tl.int64)
        below = parent == at
        left = tl.where(going, tl.max(below.to(tl.int64), 0), left)
        child = tl.min(tl.where(below & (token == picked), node, PAD), 0).to(tl.int64)
        going = going & (child < PAD)
        at = tl.where(going, child, at)
    tl.store(counts + text, count)
    tl.store(refused + text, left)
