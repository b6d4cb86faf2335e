"""The pass over whole texts is the model's own, and can be differentiated."""

from __future__ import annotations

import pytest
import torch

from forerun.models.batch import Batch
from forerun.models.config import Layer
from forerun.models.transformer import Transformer
from forerun.train.texts import Text, TextBatch, logits, states
from tests.models.rows import CONFIGS, SLOTS, VOCABULARY, chain, config, tiny

GEMMA = config(
    4,
    2,
    16,
    layers=(Layer(window=5), Layer(), Layer(window=5)),
    sandwich_norms=True,
    norm_offset=1.0,
    embedding_scale=8.0,
    activation="gelu_tanh",
    qk_norm=True,
    tied=True,
)
EXPERTS = config(4, 2, 16, layers=(Layer(experts=True), Layer()), experts=4, experts_per_token=2, expert_size=24)
SHAPES = {**CONFIGS, "gemma": GEMMA, "experts": EXPERTS, "biased mlp": config(2, 1, 32, mlp_bias=True)}
LENGTHS = (1, 9, 23)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def by_rows(model: Transformer) -> list[torch.Tensor]:
    slots = torch.split(torch.arange(SLOTS), 64)
    segments = [chain(text, slots[0][:0], own[: len(text)]) for text, own in zip(texts(), slots, strict=False)]
    output = model.forward_rows(Batch.pack(segments), model.new_storage(SLOTS))
    return list(torch.split(output.logits, list(LENGTHS)))


@pytest.mark.parametrize("name", SHAPES)
def test_the_pass_is_the_models(name: str) -> None:
    model = tiny(SHAPES[name], dtype=torch.float32)
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    before = logits(model, states(model, padded))
    expected = by_rows(model)
    after = logits(model, states(model, padded))  # of a model that is prepared for inference
    for row, (length, wanted) in enumerate(zip(LENGTHS, expected, strict=True)):
        torch.testing.assert_close(before[row, :length], wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after[row, :length], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["two share, tied", "gemma", "experts"])
def test_every_weight_gets_a_gradient(name: str) -> None:
    model = tiny(SHAPES[name], dtype=torch.float32).requires_grad_(True)
    tokens = torch.arange(2 * 64).view(2, 64) % VOCABULARY
    logits(model, states(model, tokens)).square().sum().backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert bool(parameter.grad.any())


def test_only_answers_are_wanted() -> None:
    batch = TextBatch.pack([Text((5, 6, 7), (8, 9)), Text((1,), (2,))])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert batch.wanted.tolist() == [[False, False, True, True, False], [True, False, False, False, False]]
