"""What a step does to the cache after the target's pass, without asking the host."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.kernel import Kernel, power_of_two

USUAL_MOVES = 16
"""Up to so many there is one build."""
MOST_MOVES = 1024
"""Of one group: a program holds a column of all of them."""


def _plain_moves(storage: Tensor, source: Tensor, target: Tensor) -> None:
    """storage [layers, slots, ...]: copy slots `source` over slots `target`, in every layer; −1 for none.

    source and target are [M], or [B, M] for B groups. Within a group all is read before anything is written, so a slot
    may be read and written; a slot that one group writes must not be another's.
    """
    origin, goal = source.view(-1), target.view(-1)
    kept = (origin >= 0) & (goal >= 0)
    storage[:, goal[kept].long()] = storage[:, origin[kept].long()]


def _device_moves(storage: Tensor, source: Tensor, target: Tensor) -> None:
    from forerun.kernels.gpu import step as gpu

    layers, width = storage.shape[0], storage[0, 0].numel()
    groups, count = (1, source.shape[0]) if source.dim() == 1 else (source.shape[0], source.shape[1])
    if count > MOST_MOVES:
        raise ValueError(f"{count} moves in one group are more than {MOST_MOVES}: give them as [B, M]")
    assert source.shape == target.shape
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert storage[0, 0].is_contiguous(), "what a slot holds lies together"
    if not count:
        return
    rows = max(USUAL_MOVES, power_of_two(count))
    tile = max(8, min(512, 8192 // rows, power_of_two(width)))
    gpu.move_rows[(-(-width // tile), layers, groups)](
        storage, source, target, storage.stride(0), storage.stride(1), count,
        WIDTH=width, COUNT=rows, TILE=tile, num_warps=4,
    )  # fmt: skip


move_rows = Kernel("move_rows", _device_moves, _plain_moves)
