"""What follows from the parents of a tree's nodes alone: who is above whom, whose child is whose, what a value is worth
where a parent is accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from forerun.core.shape import TreeShape


def ancestors_of(parents: Tensor) -> Tensor:
    """Reachability by doubling: after k rounds every ancestor at distance below 2^k is known."""
    size = parents.shape[1]
    steps = torch.arange(size, device=parents.device)
    reach = (steps[:, None] == steps) | (parents[..., None] == steps)  # self and parent
    for _ in range((size - 1).bit_length()):
        counts = reach.to(torch.float32)
        reach = (counts @ counts) > 0
    return reach


@lru_cache(maxsize=256)
def structure_of(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[1, N] parents and depths, [1, N, N] ancestors, [1, N, K] children."""
    parents = torch.tensor([shape.parents])
    ancestors = ancestors_of(parents)
    made = (parents, ancestors.sum(-1) - 1, ancestors, children_of(parents, shape.width))
    parents, depths, ancestors, children = (part.to(device) for part in made)
    return parents, depths, ancestors, children


def children_of(parents: Tensor, width: int | None) -> Tensor:
    """The table [B, N, K] of children in node order."""
    batch, size = parents.shape
    drafted = parents >= 0
    siblings = (parents[:, :, None] == parents[:, None, :]) & drafted[:, None, :]
    ranks = torch.tril(siblings, -1).sum(-1)  # elder siblings
    if width is None:
        width = int(torch.where(drafted, ranks + 1, 0).max())
    # A column past the end takes the padding, so that nothing has to be selected.
    table = parents.new_full((batch, size * (width + 1)), -1)
    slot = torch.where(drafted, parents * (width + 1) + ranks, width)
    nodes = torch.arange(size, device=parents.device).expand(batch, -1)
    table.scatter_(1, slot, nodes)
    return table.view(batch, size, width + 1)[:, :, :width].contiguous()


def where_parents_are_accepted(log_values: Sequence[float], parents: Sequence[int]) -> list[float]:
    """For each node its value over its parent's; 1 for the root, 0 for padding and for what is worth nothing."""
    found = [1.0]
    for value, parent in zip(log_values[1:], parents[1:], strict=True):
        there = parent >= 0 and value > -math.inf
        found.append(math.exp(min(0.0, value - log_values[parent])) if there else 0.0)
    return found
