"""Weights that learn as they will be stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from forerun.models.config import Layer
from forerun.models.heads.files import LEVELS, expanded, reduced
from forerun.train.loop import Loop
from forerun.train.methods.draft import Distil
from forerun.train.rounding import Rounding
from forerun.train.texts import TextBatch
from tests.models.rows import config, tiny
from tests.train.test_loop import OPTIONS, rising, some_texts

TARGET = config(2, 1, 32, hidden=64, intermediate_size=128, layers=(Layer(), Layer()))


def some_module() -> nn.Module:
    torch.manual_seed(3)
    made = nn.ModuleDict({"whole": nn.Linear(128, 6), "ragged": nn.Linear(10, 4), "still": nn.Linear(64, 3)})
    made["still"].requires_grad_(False)
    return made


@pytest.mark.parametrize("bits", sorted(LEVELS))
def test_weights_are_rounded_as_the_file_will_have_them(bits: int) -> None:
    module = some_module()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    stored = expanded(reduced(before, bits))
    with Rounding(module, bits).applied():
        within = {name: weight.clone() for name, weight in module.state_dict().items()}
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, before[name])
        learns = name in ("whole.weight", "ragged.weight")
        assert torch.equal(within[name], stored[name].float() if learns else before[name])
        assert not learns or not torch.equal(within[name], before[name])


def test_nothing_is_rounded_that_is_stored_in_16_bits() -> None:
    module = some_module()
    before = module.state_dict()["whole.weight"].clone()
    with Rounding(module, 16).applied():
        assert torch.equal(module.state_dict()["whole.weight"], before)


def test_weights_come_back_when_a_step_fails() -> None:
    module = some_module()
    before = module.state_dict()["whole.weight"].clone()
    with pytest.raises(KeyboardInterrupt), Rounding(module, 4).applied():
        raise KeyboardInterrupt
    assert torch.equal(module.state_dict()["whole.weight"], before)


def test_weights_that_learn_rounded_lose_less_by_it(tmp_path: Path) -> None:
    batch = TextBatch.pack(some_texts())
    losses = []
    for bits in (16, 4):
        student = tiny(TARGET, seed=1, dtype=torch.float32).requires_grad_(True)
        learner = Distil(student, tiny(TARGET, dtype=torch.float32))
        options = replace(OPTIONS, steps=250, every=250)
        rounding = Rounding(learner.module, bits)
        Loop(learner, some_texts(), options, rising(), tmp_path / f"{bits}.pt", rounding=rounding).run()
        with Rounding(learner.module, 4).applied(), torch.no_grad():
            losses.append(float(learner.loss(batch).total))
    assert losses[1] < 0.7 * losses[0]
