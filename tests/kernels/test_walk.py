"""The walk down a tree along the target's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.kernels.walk import walk

ACTIVE = torch.tensor([1])


def trees(texts: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Tokens and parents, a few of them padding; how deep the deepest is."""
    tokens = torch.randint(0, 3, (texts, size), generator=generator)
    parents = torch.full((texts, size), -1)
    depths = torch.zeros(texts, size, dtype=torch.int64)
    for text in range(texts):
        for node in range(1, size - text % 3):
            above = int(torch.randint(max(0, node - 4), node, (), generator=generator))
            parents[text, node], depths[text, node] = above, depths[text, above] + 1
    return tokens, parents, int(depths.max())


def by_hand(tokens: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], list[int], int]:
    path, taken = [0], [chosen[0]]
    while True:
        below = [node for node, parent in enumerate(parents) if parent == path[-1]]
        same = [node for node in below if tokens[node] == taken[-1]]
        if not same:
            return path, taken, int(bool(below))
        path.append(same[0])
        taken.append(chosen[same[0]])


@pytest.mark.parametrize(("texts", "size"), [(1, 1), (1, 20), (5, 8), (3, 61)])
def test_walks(texts: int, size: int, built: Callable[..., Any], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        tokens, parents, depth = trees(texts, size, generator)
        chosen = torch.randint(0, 3, (texts, size), generator=generator)
        active = (torch.rand(texts, generator=generator) > 0.2).long()
        given = [each.to(device) for each in (tokens, parents, chosen, active)]
        for form in (walk.plain, built(walk)):
            walked = form(*given, depth=depth)
            for text in range(texts):
                count = int(walked.counts[text])
                nodes, taken = walked.nodes[text].tolist(), walked.tokens[text].tolist()
                assert nodes[count:] == [-1] * (depth + 1 - count)
                assert taken[count:] == [0] * (depth + 1 - count)
                if not active[text]:
                    assert count == int(walked.refused[text]) == 0
                    continue
                own = (tokens[text].tolist(), parents[text].tolist(), chosen[text].tolist())
                assert (nodes[:count], taken[:count], int(walked.refused[text])) == by_hand(*own)


def test_what_is_no_token_ends_a_walk() -> None:
    """Broken logits give −1, which padding must not be taken for."""
    walked = walk(torch.tensor([[5, -1, 7]]), torch.tensor([[-1, -1, 0]]), torch.tensor([[-1, 7, 7]]), ACTIVE, depth=1)
    assert walked.tokens.tolist() == [[-1, 0]]
    assert walked.counts.tolist() == [1]
