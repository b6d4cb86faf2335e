"""Moves in the cache and the walk through a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.kernels.step import MOST_MOVES, greedy_walk, move_rows
from forerun.verify import batched


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


def trees(batch: int, size: int, seed: int) -> tuple[DraftTree, Tensor]:
    """Random trees over few tokens, with padding, and what a target chooses at each node."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, size), -1)
    tokens = torch.randint(0, 50, (batch, size), generator=generator)
    chosen = torch.randint(0, 50, (batch, size), generator=generator)
    for b in range(batch):
        for node in range(1, int(torch.randint(1, size + 1, (), generator=generator))):
            low = max(0, node - 3)
            parents[b, node] = parent = int(torch.randint(low, node, (), generator=generator))
            if torch.rand((), generator=generator) < 0.6 and not (parents[b, :node] == parent).any():
                tokens[b, node] = chosen[b, parent]
    tree = DraftTree.build(tokens, parents, torch.zeros(batch, dtype=torch.int64), Drawing.FIXED, check=False)
    return tree, chosen


@pytest.mark.parametrize("size", [1, 5, 30, 64])
def test_the_plain_walk_is_the_greedy_rule(size: int) -> None:
    tree, chosen = trees(8, size, size)
    verdict = batched.follow(tree, lambda sequences, nodes, depths: chosen[sequences, nodes])
    walk = greedy_walk(tree.tokens, tree.parents, chosen, tree.max_depth)
    assert torch.equal(walk.lengths, verdict.lengths)
    assert torch.equal(walk.tokens, verdict.tokens)
    assert torch.equal(walk.stops, verdict.stops)
    for b, length in enumerate(walk.lengths.tolist()):
        assert walk.nodes[b, :length].tolist() == verdict.nodes[b, :length].tolist()
    if size > 5:
        assert int(walk.lengths.max()) > 1


@pytest.mark.parametrize(("size", "short"), [(1, 0), (5, 0), (30, 0), (64, 0), (64, 2)])
def test_walk(size: int, short: int, built: Callable[..., Any], device: torch.device) -> None:
    """To the end, and cut off at a depth."""
    tree, chosen = trees(8, size, size)
    depth = short or tree.max_depth
    given = (tree.tokens.to(device), tree.parents.to(device), chosen.to(device), depth)
    want, got = greedy_walk.plain(*given), built(greedy_walk)(*given)
    for name in ("nodes", "lengths", "tokens", "stops"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
