"""The pass over whole texts is the model's own, and can be differentiated."""

from __future__ import annotations

import pytest
import torch

from forerun.models.batch import Batch, Segment
from forerun.models.config import Layer
from forerun.models.static.rows import supports
from forerun.models.transformer import Transformer
from forerun.train.dense import states
from forerun.train.methods.method import Task
from forerun.train.methods.parallel import ParallelMethod, ParallelOptions
from forerun.train.texts import Text, TextBatch
from forerun.train.whole_texts import WholeTexts
from tests.models.rows import CONFIGS, SLOTS, VOCABULARY, chain, config, in_pytorch, tiny

GEMMA = config(
    4,
    2,
    16,
    layers=(Layer(window=5), Layer(), Layer(window=5)),
    sandwich_norms=True,
    norm_offset=1.0,
    embedding_scale=8.0,
    activation="gelu",
    qk_norm=True,
    tied=True,
)
EXPERTS = config(4, 2, 16, layers=(Layer(experts=True), Layer()), experts=4, experts_per_token=2, expert_size=24)
SHAPES = {**CONFIGS, "gemma": GEMMA, "experts": EXPERTS, "biased mlp": config(2, 1, 32, mlp_bias=True)}
LENGTHS = (1, 9, 23)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", SHAPES)
def test_the_pass_is_the_models(name: str) -> None:
    model = tiny(SHAPES[name], dtype=torch.float32)
    model.learned_through = True
    depth = len(model.config.layers)
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    before = states(model, padded, range(depth + 1))
    slots = torch.split(torch.arange(SLOTS), 64)
    segments = [chain(text, slots[0][:0], own[: len(text)]) for text, own in zip(texts(), slots, strict=False)]
    output = model.forward_rows(Batch.pack(segments), model.new_storage(SLOTS), layers=range(depth + 1))
    after = states(model, padded, [depth])  # of a model that is prepared for inference
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    for found in (before, after):
        logits = found.normed[real] @ model.head_rows().T
        torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)
        for layer, hidden in found.behind.items():
            torch.testing.assert_close(hidden[real], output.features[layer], atol=1e-4, rtol=1e-4)
    assert set(before.behind) == set(range(depth + 1))


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if supports(shape)])
def test_the_kernels_of_inference_give_the_same(name: str) -> None:
    model = in_pytorch(tiny(SHAPES[name], dtype=torch.float32))
    depth = len(model.config.layers)
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    wanted = (0, 1, depth)
    with torch.no_grad():
        right, found = states(model, padded, wanted), WholeTexts(model).of(padded, wanted)
    torch.testing.assert_close(found.normed, right.normed, atol=1e-4, rtol=1e-4)
    assert set(found.behind) == set(wanted)
    for layer, hidden in right.behind.items():
        torch.testing.assert_close(found.behind[layer], hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["two share, tied", "gemma", "experts"])
def test_every_weight_gets_a_gradient(name: str) -> None:
    model = tiny(SHAPES[name], dtype=torch.float32).requires_grad_(True)
    tokens = torch.arange(2 * 64).view(2, 64) % VOCABULARY
    (states(model, tokens).normed @ model.lm_head.weight.T).square().sum().backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert bool(parameter.grad.any())


# --- look-ahead rows -------------------------------------------------------------------------------------------


def looking_ahead(target: Transformer) -> ParallelMethod:
    from pathlib import Path

    return ParallelMethod(ParallelOptions(heads=3, anchors=4), Task(target, {}, Path(), ()))


@pytest.mark.parametrize("name", ["one head each", "two share, tied", "gemma"])
def test_look_ahead_rows_are_those_of_the_drafter(name: str) -> None:
    target = tiny(SHAPES[name], dtype=torch.float32)
    method = looking_ahead(target)
    tokens = texts()[2]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(attention, q, k, v):  # type: ignore[no-untyped-def]
        from forerun.train.dense import causal

        kept.append((k, v))
        return causal(attention, q, k, v)

    states(target, tokens[None], attend=keep)
    anchors = torch.tensor([[4, 0, 17]])
    places = (anchors[..., None] + torch.arange(1, 4)).flatten(1)
    ours = method._rows(anchors, places, kept)[0].detach() @ target.head_rows().T
    target.add_embeddings(method.module.look_ahead.weight.detach())
    for number, anchor in enumerate(anchors[0].tolist()):
        # As the engine does: a chain behind the root, which is the token at the anchor.
        rows = torch.cat([tokens[: anchor + 1], target.vocab_size + torch.arange(3)])
        slots = torch.arange(len(rows))
        segment = Segment(0, rows, slots, None, slots[:0], slots, 3)
        expected = target.forward_rows(Batch.pack([segment]), target.new_storage(SLOTS)).logits
        torch.testing.assert_close(ours[3 * number : 3 * number + 3], expected, atol=1e-4, rtol=1e-4)


def test_anchors_lie_where_there_is_something_to_foresee() -> None:
    method = looking_ahead(tiny(CONFIGS["one head each"], dtype=torch.float32))
    batch = TextBatch.pack([Text.of(range(5), range(6)), Text.of((1, 2), (3,)), Text.of((1, 2), ())], seed=4)
    anchors, reached = method._anchors(batch)
    assert 4 <= int(anchors[0].min()) <= int(anchors[0].max()) <= 8
    assert reached[0, :, 0].all(), "the first row always foresees a token of the answer"
    for anchor, row in zip(anchors[0].tolist(), reached[0].tolist(), strict=True):
        assert row == [float(anchor + ahead < 10) for ahead in (1, 2, 3)]
    assert not reached[1:].any()
    loss = method.loss(batch)
    loss.total.backward()  # type: ignore[no-untyped-call]
    gradient = method.module.look_ahead.weight.grad
    assert gradient is not None
    assert bool(gradient.isfinite().all() & gradient.any(1).all())


def test_a_model_that_was_used_can_be_learned_through() -> None:
    target = tiny(CONFIGS["one head each"], dtype=torch.float32)
    target.learned_through = True
    tokens = texts()[1]
    slots = torch.arange(len(tokens))
    target.forward_rows(Batch.pack([chain(tokens, slots[:0], slots)]), target.new_storage(SLOTS))
    method = looking_ahead(target)
    method.loss(TextBatch.pack([Text.of(range(5), range(6))], seed=4)).total.backward()  # type: ignore[no-untyped-call]
    assert method.module.look_ahead.weight.grad is not None
    assert not any(weight.is_inference() for weight in target.parameters())
