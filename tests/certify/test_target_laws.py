"""What rounding explains, also of models whose storage holds tokens instead of keys and values."""

from __future__ import annotations

import pytest
import torch

from forerun.certify.target_laws import LEAST, LIKELY, MOST, TargetLaws
from forerun.models.adapter import adapt
from tests.models.test_adapter_models import RECOMPUTED, make


@pytest.mark.parametrize("name", RECOMPUTED)
def test_rounding_is_that_of_the_logits(name: str) -> None:
    """Of a model that is read anew in every pass, in the format it computes in: coarser in bfloat16."""
    prompt, text = [3, 4, 5], [6, 7, 8, 9, 10, 11]
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, dtype)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + text])).logits[0, -1]
        place = torch.finfo(dtype).eps * float(logits.topk(LIKELY).values.abs().max())
        target = adapt(model)
        assert target.dtype == dtype
        assert 0.9 * LEAST * place <= TargetLaws(target).rounding(prompt, text) <= 1.1 * MOST * place
