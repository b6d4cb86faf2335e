"""Moves in the cache and the walk through a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels.step import MOST_MOVES, move_rows


def moves(groups: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of a path that move down, [groups, count]: a slot is often read by one move and written by another."""
    source = torch.full((groups, count), -1)
    target = torch.full((groups, count), -1)
    for group in range(groups):
        kept = int(torch.randint(0, count + 1, (), generator=generator))
        rows = torch.randperm(2 * count, generator=generator)[:kept].sort().values
        source[group, :kept] = 40 * group + rows
        target[group, :kept] = 40 * group + torch.arange(kept)
    source[::2, -1] = target[1::2, 0] = -1  # one of the two is enough to say that there is none
    source[0, 0], target[0, -1] = 3, 1
    return source, target


def test_the_plain_moves_read_before_they_write() -> None:
    storage = torch.arange(6.0).view(1, 6, 1, 1).repeat(2, 1, 1, 1)
    move_rows(storage, torch.tensor([2, 3, -1, 5]), torch.tensor([1, 2, 0, 3]))
    assert storage[:, :, 0, 0].tolist() == [[0, 2, 3, 5, 4, 5]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "count"), [(1, 1), (1, 20), (4, 7), (3, 16)])
def test_moves(groups: int, count: int, dtype: torch.dtype, built: Callable[..., Any], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    whole = torch.randn(3, 160, 2, 3, 32, generator=generator).to(dtype).to(device)  # [layers, slots, 2, kv_heads, D]
    source, target = (t.to(device) for t in moves(groups, count, generator))
    want = whole.clone()
    move_rows.plain(want, source, target)
    built(move_rows)(whole, source, target)
    assert torch.equal(whole, want)
    if groups == 1:
        again = whole.clone()
        move_rows.plain(want, source[0], target[0])
        built(move_rows)(again, source[0], target[0])
        assert torch.equal(again, want)


def test_too_many_moves_of_one_group_are_refused(built: Callable[..., Any], device: torch.device) -> None:
    many = torch.arange(MOST_MOVES + 1, device=device)
    with pytest.raises(ValueError, match=r"give them as \[B, M\]"):
        built(move_rows)(torch.zeros(1, 2000, 1, 1, 8, device=device), many, many)
