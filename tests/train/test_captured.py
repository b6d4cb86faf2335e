"""Steps that are launched at once: padded to a few shapes, and the same as those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.train.captured import CapturedSteps, room_for, steps_around
from forerun.train.loop import Loop, LoopOptions
from forerun.train.loss import Steady
from forerun.train.methods.method import Method
from forerun.train.texts import Text, TextBatch
from tests.models.rows import VOCABULARY, tiny
from tests.train.test_methods import TARGET, method, texts

STEADY = ["blockwise", "eagle", "eagle3", "medusa", "mtp"]
WITH: dict[str, dict[str, Any]] = {"eagle": {"noise": 0.0}, "medusa": {"stem": 24}}


def stirred(name: str) -> Method:
    made = method(name, tiny(TARGET, dtype=torch.float32), **WITH.get(name, {}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in made.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return made


@pytest.mark.parametrize("name", STEADY)
def test_what_is_padded_counts_nothing(name: str) -> None:
    """Two batches of one shape: the second finds the buffers of the first."""
    learner = stirred(name)
    assert isinstance(learner, Steady)
    assert learner.steady
    learning = [weight for weight in learner.module.parameters() if weight.requires_grad]
    steps = CapturedSteps(learner, learning, 4 * 128)
    rooms = set()
    for some in (texts()[:4], texts()[3:]):
        batch = TextBatch.pack(some, seed=3)
        rooms.add(room_for(batch, 4 * 128))
        for weight in learning:
            assert weight.grad is not None
            weight.grad.fill_(7.0)
        names, sums = steps.learn(batch)
        gradients = [weight.grad.clone() for weight in learning if weight.grad is not None]
        loss = learner.loss(batch)
        wanted = torch.autograd.grad(loss.total / loss.count, learning)
        assert names == tuple(loss.figures)
        torch.testing.assert_close(sums[0].float(), loss.total.detach(), rtol=1e-4, atol=1e-5)
        for key, value in zip(names, sums[1:].tolist(), strict=True):
            assert value == pytest.approx(float(loss.figures[key]), rel=1e-4), key
        for found, right in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-5)
    assert len(rooms) == 1
    assert len(steps._shapes) == 1


def test_every_length_has_a_shape_with_room() -> None:
    shapes = set()
    for length in range(1, 2049):
        below, above = steps_around(length)
        assert below < length <= above
        assert above <= max(64, 1.26 * length)
        shapes.add(above)
        batch = TextBatch.pack([Text.of([1], [1] * (length - 1))] * (4096 // length))
        room = room_for(batch, 4096)
        assert room.texts >= 4096 // length
        assert room.laws >= batch.laws == (4096 // length) * (length - 1)
        assert batch.padded(room).laws == batch.laws
    assert len(shapes) < 24


def test_noise_is_drawn_text_by_text_and_cannot_be_captured() -> None:
    learner = method("eagle", tiny(TARGET, dtype=torch.float32), noise=0.1)
    assert isinstance(learner, Steady)
    assert not learner.steady


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_run_learns_the_same(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (10, 40), generator=generator).tolist()
    some = [Text.of(row[:4], row[4 : 20 + index]) for index, row in enumerate(rows)]
    options = LoopOptions(steps=6, batch_tokens=120, learning_rate=3e-3, every=3, optimizer="muon")
    histories = []
    for captured in (False, True):
        learner = stirred(name)
        loop = Loop(learner, some, options, lambda: 0.0, tmp_path / f"{captured}.pt")
        assert loop.captured is None
        if captured:
            loop.captured = CapturedSteps(learner, loop.learning, options.batch_tokens)
        histories.append(loop.run().history)
    for plain, padded in zip(*histories, strict=True):
        assert plain.keys() == padded.keys()
        for key in plain:
            assert padded[key] == pytest.approx(plain[key], rel=0.01, abs=1e-3), key
