"""Tokens beyond the vocabulary that a model reads and never writes, in every kind of pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.drafters.none import NoDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.batch import Batch, Segment
from forerun.models.transformer import Transformer
from tests.models.rows import CONFIGS, VOCABULARY, tiny, with_static_pass

KINDS = ("float32", "bfloat16", "static")
TEXT = [3, 1, 4, 1, 5, 90, 2, 6]


def model(kind: str, *, tied: bool, scale: float = 1.0) -> Transformer:
    shape = replace(CONFIGS["two share, tied"], tied=tied, embedding_scale=scale)
    made = tiny(shape, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind == "static":
        return with_static_pass(made)
    made.prepare()
    return made


def logits(target: Transformer, tokens: list[int]) -> Tensor:
    count = len(tokens)
    blocks = [2, 0]
    slots = torch.tensor([block * 16 + place for block in blocks for place in range(16)])
    segment = Segment(
        0, torch.tensor(tokens), torch.arange(count), None, slots[:0], slots[:count], count, blocks=blocks
    )
    return target.forward_rows(Batch.pack([segment]), target.new_storage(64)).logits.clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_ordinary_tokens_have_the_logits_they_had(kind: str, tied: bool) -> None:
    target = model(kind, tied=tied)
    before, weights = logits(target, TEXT), {name: tensor.clone() for name, tensor in target.state_dict().items()}
    target.add_embeddings(torch.randn(3, 64))
    after = logits(target, [*TEXT, VOCABULARY, VOCABULARY + 2])
    assert after.shape == (len(TEXT) + 2, VOCABULARY)
    assert torch.equal(after[: len(TEXT)], before)
    assert torch.equal(logits(target, TEXT), before)
    assert target.vocab_size == VOCABULARY
    assert list(target.state_dict()) == list(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_embedding_reads_like_the_token_whose_it_is(kind: str, scale: float) -> None:
    target = model(kind, tied=True, scale=scale)
    own = target.model.embed_tokens.weight.data
    target.add_embeddings(own[[7, 90]])
    extra = [VOCABULARY if token == 7 else VOCABULARY + 1 if token == 90 else token for token in [*TEXT, 7]]
    assert extra != [*TEXT, 7]
    assert torch.equal(logits(target, extra), logits(target, [*TEXT, 7]))
    first = logits(target, [5, VOCABULARY])
    target.add_embeddings(own[[11]])  # others take their place
    assert torch.equal(logits(target, [5, VOCABULARY]), logits(target, [5, 11]))
    assert not torch.equal(logits(target, [5, VOCABULARY]), first)


def test_what_was_captured_before_is_dropped() -> None:
    target = model("static", tied=True)
    storage = target.new_storage(64)
    assert target.static is not None
    slots = torch.arange(16)
    segment = Segment(0, torch.tensor([1]), torch.tensor([0]), None, slots[:0], slots[:1], 1, blocks=[0])
    target.forward_rows(Batch.pack([segment]), storage)
    assert len(target.static.captured) == 1
    target.add_embeddings(torch.zeros(1, 64))
    assert not target.static.captured
    target.forward_rows(Batch.pack([segment]), storage)
    del storage
    assert not target.static.captured


def test_the_callers_tensor_stays_the_callers() -> None:
    target, given = model("float32", tied=True), torch.ones(1, 64, requires_grad=True)
    target.add_embeddings(given)
    before = logits(target, [VOCABULARY])
    given.data.zero_()
    assert torch.equal(logits(target, [VOCABULARY]), before)


@pytest.mark.parametrize("shape", [(3, 65), (0, 64), (64,)])
def test_refusals(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not fit the model: they must be \[T, 64\]"):
        model("float32", tied=True).add_embeddings(torch.zeros(shape))


def test_a_prompt_cannot_name_them() -> None:
    target = model("float32", tied=True)
    target.add_embeddings(torch.zeros(1, 64))
    with pytest.raises(ValueError, match=f"prompt names token {VOCABULARY}"):
        Engine(target, NoDrafter(), slots=64).add(Request([1, VOCABULARY]))
