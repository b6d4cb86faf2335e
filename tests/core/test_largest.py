from __future__ import annotations

import pytest
import torch

from forerun.core.largest import largest


@pytest.mark.parametrize("size", [49_152, 1000, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_is_topk(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    for spread in (1.0, 0.01):  # the second has many ties in bfloat16
        scores = (torch.randn(5, size, generator=generator) * spread).to(dtype)
        for count in (1, 8, 40):
            values, places = largest(scores, count)
            assert torch.equal(values, scores.topk(count, -1).values)
            assert torch.equal(scores.gather(1, places), values)
            assert all(len(set(row)) == count for row in places.tolist())
