"""What a step does to the cache after the target's pass."""

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
