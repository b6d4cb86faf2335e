"""What a step does around the target's pass: the walk through a tree, and the cache after it."""

from __future__ import annotations

from forerun.kernels.gpu.language import Value, constexpr, jit, tl


@jit("count")
def move_rows(
    storage: Value,  # [planes, slots, WIDTH]
    source: Value,  # [groups, count]; −1 for none
    target: Value,
    plane_stride: Value,
    slot_stride: Value,
    count: Value,
    WIDTH: constexpr,
    COUNT: constexpr,
    TILE: constexpr,
) -> Value:
    """One program takes some columns of all rows of a group: it reads them all before it writes any."""
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    plane = tl.program_id(1).to(tl.int64)
    move = tl.arange(0, COUNT)
    listed = tl.program_id(2) * count + move
    origin = tl.load(source + listed, mask=move < count, other=-1).to(tl.int64)
    goal = tl.load(target + listed, mask=move < count, other=-1).to(tl.int64)
    mask = ((origin >= 0) & (goal >= 0))[:, None] & (columns < WIDTH)[None, :]
    base = storage + plane * plane_stride
    held = tl.load(base + origin[:, None] * slot_stride + columns[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + goal[:, None] * slot_stride + columns[None, :], held, mask=mask)


@jit("size", "depth")
def greedy_walk(
    tokens: Value,  # [B, N]
    parents: Value,  # [B, N]
    chosen: Value,  # [B, N]
    nodes: Value,  # [B, depth]
    lengths: Value,  # [B]
    finals: Value,  # [B]
    stops: Value,  # [B]
    size: Value,
    depth: Value,
    SIZE: constexpr,
) -> Value:
    """One program for a sequence, with its whole tree in registers."""
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    inside = node < size
    token = tl.load(tokens + sequence * size + node, mask=inside, other=-1)
    parent = tl.load(parents + sequence * size + node, mask=inside, other=-1).to(tl.int32)
    choice = tl.load(chosen + sequence * size + node, mask=inside, other=-1)
    at = 0
    length = 0
    for level in range(depth):
        wanted = tl.sum(tl.where(node == at, choice, 0), 0)
        follower = tl.min(tl.where((parent == at) & (token == wanted) & (node > 0), node, SIZE), 0)
        found = follower < SIZE  # where it is not, the next level asks the same and finds nothing either
        tl.store(nodes + sequence * depth + level, tl.where(found, follower, -1))
        at = tl.where(found, follower, at)
        length += found.to(tl.int32)
    tl.store(lengths + sequence, length)
    tl.store(stops + sequence, at)
    tl.store(finals + sequence, tl.sum(tl.where(node == at, choice, 0), 0))
