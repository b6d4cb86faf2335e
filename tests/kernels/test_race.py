"""The race in one pass against the race with all its noise: the same tokens, and the same bits on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.noise import Purpose, race, row_key

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numbers wrap with a warning


def keys(rows: int, device: torch.device, seed: int = 0) -> Tensor:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(seed))
    return row_key(seeds, torch.arange(rows), Purpose.TOKEN).to(device)


@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 1024), (7, 1025), (3, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_tokens(
    rows: int, size: int, dtype: torch.dtype, built: Callable[..., Any], device: torch.device
) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 3
    p = torch.softmax(logits, -1).to(device, dtype)
    for seed in range(4):
        own = keys(rows, device, seed)
        assert torch.equal(built(race)(p, own), race.plain(p, own))


def test_flat_laws_are_decided_by_the_last_bits(built: Callable[..., Any], device: torch.device) -> None:
    """All tokens alike, so that the noise alone decides; and rows of a wider tensor."""
    p = torch.full((64, 4000), 1 / 3000, device=device)[:, :3000]
    own = keys(64, device)
    found = built(race)(p, own)
    assert torch.equal(found, race.plain(p, own))
    assert len(set(found.tolist())) > 55


def test_tokens_without_weight_never_arrive(built: Callable[..., Any], device: torch.device) -> None:
    p = torch.zeros(3, 2500, device=device)
    p[0, 0] = p[1, 2499] = p[2, 1024] = 1.0
    assert built(race)(p, keys(3, device)).tolist() == [0, 2499, 1024]
    assert built(race)(p[:0], keys(0, device)).tolist() == []
