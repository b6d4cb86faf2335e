"""A head's pass over whole texts is what it does at inference: it reads a text, then goes on from its own states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.models.batch import Batch, Segment
from forerun.models.heads.feature_head import METHODS, FeatureHead, frozen_head, new_head
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.unroll import unroll
from tests.models.rows import SLOTS, VOCABULARY, config, tiny

LENGTH, STEPS = 14, 4
TARGET = config(4, 2, 16)


def made(method: str) -> tuple[Transformer, FeatureHead]:
    target = tiny(TARGET, dtype=torch.float32)
    head = new_head(method, target, ids=torch.arange(0, VOCABULARY, 2), seed=1)
    generator = torch.Generator().manual_seed(2)
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return target, head


def at_inference(head: FeatureHead, tokens: Tensor, features: Tensor, row: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the head makes of the draft that begins at a row: the text up to it in one pass, then a node at a time. The
    states, and the logits."""
    storage = head.new_storage(SLOTS)
    slots = torch.arange(SLOTS)
    end = row + 1
    text = Segment(0, tokens[1 : end + 1], torch.arange(end), None, slots[:0], slots[:end], end)
    output = head.forward_rows(Batch.pack([text], features=features[:end]), storage, layers=[1])
    found, logits = [output.features[1][-1]], [output.logits[-1]]
    context = slots[:end]
    for step in range(1, STEPS):
        place, own = row + step, slots[64 + 2 * step : 66 + 2 * step]
        # In a tree: beside it another node, which it must not see.
        node = Segment(
            0,
            torch.stack([torch.tensor(7), tokens[place + 1]]),
            torch.tensor([place, place]),
            torch.eye(2, dtype=torch.bool),
            context,
            own,
            2,
        )
        features = torch.stack([torch.ones_like(found[-1]), found[-1]])
        output = head.forward_rows(Batch.pack([node], features=features), storage, layers=[1])
        found.append(output.features[1][1])
        logits.append(output.logits[1])
        context = torch.cat([context, own[1:]])
    return found, logits


def same(ours: Tensor, theirs: Tensor) -> None:
    """But for rounding, which is that of the largest number: eagle, which has no norms, makes hundreds."""
    torch.testing.assert_close(ours, theirs, atol=1e-4 + 1e-5 * float(ours.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_the_one_at_inference(method: str) -> None:
    target, head = made(method)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    features = head.fuse(states(target, tokens, head.taps).behind)
    dense = unroll(head, tokens, features, STEPS)
    assert [step.shape for step in dense] == [(2, LENGTH - 1, target.config.hidden_size)] * STEPS
    drafting = frozen_head(head, target)
    with torch.no_grad():
        for text in range(2):
            for row in (0, 1, 5, LENGTH - 1 - STEPS):
                expected, logits = at_inference(drafting, tokens[text], features[text], row)
                for step in range(STEPS):
                    ours = dense[step][text, row]
                    same(ours, expected[step])
                    same(head.lm_head(head.model.norm(ours)), logits[step])


@pytest.mark.parametrize("method", METHODS)
def test_every_weight_gets_a_gradient(method: str) -> None:
    target, head = made(method)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    features = head.fuse(states(target, tokens, head.taps).behind)
    sum(head.model.norm(step).square().sum() for step in unroll(head, tokens, features, 3)).backward()
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert bool(weight.grad.isfinite().all())
            assert bool(weight.grad.any()), name
    assert all(weight.grad is None for weight in target.parameters())
