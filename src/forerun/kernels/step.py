"""What a step does around the target's pass without asking the host: the walk through a tree, the cache after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class Walk:
    """For B sequences, as in `core.verdict.Verdict`."""

    nodes: Tensor  # [B, depth] accepted nodes in order, padded with −1; the root is not among them
    lengths: Tensor  # [B] how many
    tokens: Tensor  # [B] the target's token behind the last one
    stops: Tensor  # [B] the node that it follows; 0 where nothing was accepted


def _plain_walk(tokens: Tensor, parents: Tensor, chosen: Tensor, depth: int) -> Walk:
    """Follow the target's choices [B, N] from node 0 down a tree of tokens and parents [B, N] (−1 for the root and for
    padding), no deeper than `depth`. Of equal siblings the first is taken."""
    batch, size = tokens.shape
    node = torch.arange(size, device=tokens.device)
    at = torch.zeros(batch, 1, dtype=torch.int64, device=tokens.device)
    path = []
    for _ in range(depth):
        matches = (parents == at) & (tokens == chosen.gather(1, at)) & (node > 0)
        follower = torch.where(matches, node, size).amin(1, keepdim=True)
        found = follower < size  # where it is not, the next level asks the same and finds nothing either
        path.append(torch.where(found, follower, -1))
        at = torch.where(found, follower, at)
    nodes = torch.cat(path, 1) if path else at[:, :0]
    return Walk(nodes, (nodes >= 0).sum(1), chosen.gather(1, at)[:, 0], at[:, 0])


def _device_walk(tokens: Tensor, parents: Tensor, chosen: Tensor, depth: int) -> Walk:
    from forerun.kernels.gpu import step as gpu

    batch, size = tokens.shape
    tokens, parents, chosen = tokens.contiguous(), parents.contiguous(), chosen.contiguous()
    numbers = torch.empty(batch * (depth + 3), dtype=torch.int64, device=tokens.device)
    nodes = numbers[: batch * depth].view(batch, depth)
    lengths, finals, stops = numbers[batch * depth :].view(3, batch)
    gpu.greedy_walk[(batch,)](
        tokens, parents, chosen, nodes, lengths, finals, stops, size, depth,
        SIZE=power_of_two(size), num_warps=1 if size <= 128 else 4,
    )  # fmt: skip
    return Walk(nodes, lengths, finals, stops)


move_rows = Kernel("move_rows", _device_moves, _plain_moves)
greedy_walk = Kernel("greedy_walk", _device_walk, _plain_walk)
