"""A model is told from others in every form, and only from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.models.batch import Batch
from forerun.models.identity import weights_identity
from tests.models.rows import CONFIGS, chain, tiny


@pytest.mark.parametrize("name", ["two share, tied", "eight share, normed, wide"])
def test_it_is_the_same_in_every_form(name: str) -> None:
    shape = CONFIGS[name]
    exact = weights_identity(tiny(shape, dtype=torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(shape, dtype=dtype)
        assert weights_identity(model) == exact
        tokens = torch.arange(4)
        model.forward_rows(Batch.pack([chain(tokens, tokens[:0], tokens)]), model.new_storage(64))
        assert model.prepared
        assert weights_identity(model) == exact
    named = replace(shape, family="other", eos=(1,), context_length=17)
    assert weights_identity(tiny(named, dtype=torch.float32)) == exact


def test_others_have_another_one() -> None:
    shape = CONFIGS["two share, tied"]
    exact = weights_identity(tiny(shape, dtype=torch.float32))
    assert weights_identity(tiny(shape, seed=1, dtype=torch.float32)) != exact
    assert weights_identity(tiny(replace(shape, norm_eps=1e-6), dtype=torch.float32)) != exact
    changed = tiny(shape, dtype=torch.float32)
    changed.get_parameter("model.norm.weight").data[3] += 0.5
    assert weights_identity(changed) != exact
    changed = tiny(shape, dtype=torch.float32)
    changed.model.embed_tokens.weight.data[0, 0] += 0.5
    assert weights_identity(changed) != exact
