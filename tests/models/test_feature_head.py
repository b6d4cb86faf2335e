"""Passes of heads: what C computes is what PyTorch computes, and the static pass is the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.models.batch import Batch, Segment
from forerun.models.config import Layer, ModelConfig
from forerun.models.heads.feature_head import FeatureHead, default_taps, frozen_head, new_head
from forerun.models.native import amx
from forerun.models.static.buffers import Buffers
from forerun.models.static.rows import Result, Rows
from forerun.models.static.static_pass import StaticPass
from forerun.models.storage import Storage
from forerun.models.target import Output
from forerun.models.transformer import Transformer
from tests.models.rows import NEAR_IN_BYTES, each_pass, in_pytorch, round_matrices

METHODS = ("eagle", "eagle3", "mtp")
CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    heads=2,
    kv_heads=1,
    head_dim=64,
    layers=tuple(Layer() for _ in range(4)),
    context_length=256,
)


def target_of(dtype: torch.dtype) -> Transformer:
    model = Transformer(CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0))
    return model.to(dtype).requires_grad_(False)


def head_of(method: str, target: Transformer) -> FeatureHead:
    return frozen_head(new_head(method, target, ids=torch.arange(0, 128, 2, device=target.device)), target)


def passes(head: FeatureHead, dtype: torch.dtype) -> list[Output]:
    """A chain of 20, then two nodes and a child of each behind it."""
    generator = torch.Generator().manual_seed(1)
    storage = head.new_storage(64)
    states = torch.randn(24, 64, generator=generator).to(dtype)
    places = torch.arange(20)
    chain = Segment(0, places % 7, places, None, places[:0], places, 20, blocks=[0, 1])
    tree = Segment(
        0,
        torch.tensor([3, 4, 5, 6]),
        torch.tensor([20, 20, 21, 21]),
        torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]).bool(),
        places,
        torch.arange(20, 24),
        4,
        blocks=[0, 1],
    )
    found = []
    for segment, own in ((chain, states[:20]), (tree, states[20:])):
        output = head.forward_rows(Batch.pack([segment], features=own), storage, (1,))
        found.append(replace(output, logits=output.logits.clone(), features={1: output.features[1].clone()}))
    return found


def close(found: Tensor, expected: Tensor, near: float = 0.03) -> None:
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(found.float() / scale, expected.float() / scale, atol=near, rtol=0.0)


@each_pass
@pytest.mark.parametrize("method", METHODS)
def test_the_pass_in_c_is_the_plain_one(dtype: torch.dtype, method: str) -> None:
    head = head_of(method, target_of(dtype))
    found = passes(head, dtype)
    assert head.in_c is not None
    plain = head_of(method, target_of(dtype))
    if dtype == torch.float32:  # where nothing but the weights is rounded
        assert head.in_c.in_bytes == (head.config.intermediate_size % head.in_c.arithmetic.order.inputs_in_bytes == 0)
        round_matrices(plain, dtype)
    expected = passes(in_pytorch(plain), dtype)
    near = NEAR_IN_BYTES if dtype == torch.float32 else 0.03
    for one, other in zip(found, expected, strict=True):
        close(one.logits, other.logits, near)
        close(one.features[1], other.features[1], near)


@pytest.mark.parametrize("method", METHODS)
def test_the_static_pass_is_the_plain_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = Rows.run

    def counted(rows: Rows, buffers: Buffers, storage: Storage) -> Result:
        runs.append(1)
        return run(rows, buffers, storage)

    monkeypatch.setattr(Rows, "run", counted)
    head = in_pytorch(head_of(method, target_of(torch.float32)))
    expected = [(output.logits, output.features[1]) for output in passes(head, torch.float32)]
    head.static = StaticPass(head)
    found = [(output.logits.clone(), output.features[1].clone()) for output in passes(head, torch.float32)]
    assert len(runs) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_what_every_part_reads_matters(method: str) -> None:
    """Token, state and ancestors each change what a row gives."""
    head = head_of(method, target_of(torch.float32))
    before = passes(head, torch.float32)[1].logits
    for name in ("fc.weight", "model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        other = head_of(method, target_of(torch.float32))
        if name == "fc.weight" and method == "eagle3":  # it fuses states, before they become rows
            continue
        other.get_parameter(name).data.mul_(1.5)
        assert not torch.allclose(passes(other, torch.float32)[1].logits, before)


def test_fusing_takes_the_layers_in_order() -> None:
    target = target_of(torch.float32)
    head = head_of("eagle3", target)
    assert head.taps == default_taps(4) == (1, 2)
    assert default_taps(30) == (2, 15, 27)
    states = {tap: torch.randn(3, 64) for tap in head.taps}
    expected = torch.cat([states[tap] for tap in head.taps], -1) @ head.fc.weight.T
    torch.testing.assert_close(head.fuse(states), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_output_head_come_back_as_they_were(tied: bool, dtype: torch.dtype) -> None:
    model = Transformer(replace(CONFIG, tied=tied))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model = model.to(dtype).requires_grad_(False)
    expected = model.lm_head.weight.data.clone()
    places = torch.arange(3)
    segment = Segment(0, places, places, None, places[:0], places, 3)
    model.forward_rows(Batch.pack([segment]), model.new_storage(16))  # which lays the weights out anew
    ids = torch.tensor([0, 31, 32, 127])
    assert torch.equal(model.head_rows(ids), expected[ids])
    assert torch.equal(model.head_rows(), expected)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_states_of_several_layers_are_joined_as_in_pytorch(rows: int) -> None:
    head = head_of("eagle3", target_of(torch.bfloat16))
    if not amx.supports(head.config):
        pytest.skip("needs a CPU with AMX")
    generator = torch.Generator().manual_seed(rows)
    states = {tap: torch.randn(rows + 2, 64, generator=generator).bfloat16()[1:-1] for tap in head.taps}
    expected = head.fuse(states)
    head.prepare()
    assert head.joined is not None
    close(head.fuse(states), expected)
