"""GGUF files of every architecture give back the weights and the answers of the model they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.models.checkpoint import load_tensors
from forerun.models.gguf_config import llama3_factors
from forerun.models.load import resolve
from forerun.models.store import Store
from tests.models.checkpoints import EXPERTS, make, weights, write_gguf

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "gemma 3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window": 6}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make(family, **changes)
    path = write_gguf(model, tmp_path / "model.gguf")
    source = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert source.config is not None
    loaded = load_tensors(source.folder, source.config, torch.float32)
    expected = weights(model)
    assert set(loaded) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(loaded[key], tensor, rtol=0, atol=1e-6 if "norm" in key else 0)
    again = AutoModelForCausalLM.from_pretrained(source.folder)  # what we write, transformers reads
    tokens = torch.arange(0, 40)[None] * 5 % 288
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def rope_factors(theta: float, size: int, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """As llama.cpp's converter makes them."""
    factors = []
    for index in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (index / size)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


@pytest.mark.parametrize(
    ("theta", "size", "factor", "low", "high", "original"),
    [(5e5, 128, 8.0, 1.0, 4.0, 8192), (5e5, 64, 32.0, 1.0, 4.0, 8192), (1e4, 64, 4.0, 1.0, 8.0, 2048)],
)
def test_llama3_positions_are_recognised(
    theta: float, size: int, factor: float, low: float, high: float, original: int
) -> None:
    factors = rope_factors(theta, size, factor, low, high, original).double().numpy()
    assert llama3_factors(factors, theta, size, "f") == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": pytest.approx(high),
        "original_max_position_embeddings": original,
    }


def test_other_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="not the factors of Llama-3"):
        llama3_factors(np.linspace(1, 8, 32), 1e4, 64, "f")
    with pytest.raises(ValueError, match="not the factors of Llama-3"):
        llama3_factors(np.ones(31), 1e4, 64, "f")
    assert llama3_factors(np.ones(32), 1e4, 64, "f") == {}


def test_llama3_positions_survive(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    model = make("Llama", head_dim=64, rope_parameters=rope)
    extra = {"rope_freqs.weight": rope_factors(1e4, 64, 8.0, 1.0, 4.0, 512)}
    path = write_gguf(model, tmp_path / "model.gguf", extra=extra)
    source = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert source.hf_config["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_scaled_positions(more: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(make("Llama"), tmp_path / "model.gguf", more=more)
    source = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert source.hf_config["rope_parameters"] == {"rope_theta": 10_000.0, **expected}


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    path = write_gguf(make("Llama"), tmp_path / "model.gguf", more={"llama.attention.sliding_window": 8})
    source = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert source.config is not None
    assert [layer.window for layer in source.config.layers] == [8, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"more": {"general.architecture": "mamba"}}, "architecture 'mamba'"),
        ({"more": {"llama.rope.dimension_count": 4}}, "rope.dimension_count differs"),
        ({"more": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}}, "'longrope'"),
        ({"more": {"llama.attention.head_count_kv": [2, 2]}}, "attention.head_count_kv must be a whole number"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "model.layers.1.mlp.up_proj.weight is missing"),
        ({"drop": ("token_embd.weight",)}, "token_embd.weight is missing"),
        ({"extra": {"blk.0.ssm_a.weight": torch.ones(3)}}, "blk.0.ssm_a.weight has no place"),
        ({"extra": {"blk.0.attn_v.bias": torch.ones(16)}}, "blk.0.attn_v.bias has no place"),
        ({"more": {"split.count": 3}}, "one of 3 parts"),
        ({"more": {"llama.block_count": 2**31}}, "block_count must be a whole number of at most"),
        ({"pre": "invented"}, "rule 'invented'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(make("Llama"), tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=message) as refusal:
        resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
    assert str(path) in str(refusal.value)
    assert not list((tmp_path / "cache").rglob("*safetensors*"))
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_what_a_gemma_file_says_beyond_the_habit(tmp_path: Path) -> None:
    """Which layers are global, and how far the others turn; every sixth, and 10,000, where nothing is said."""
    more = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0}
    path = write_gguf(make("Gemma3", head_dim=16, sliding_window=8), tmp_path / "model.gguf", more=more)
    config = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache")).config
    assert config is not None
    assert [layer.window for layer in config.layers] == [8, None]
    assert [layer.rope.theta for layer in config.layers if layer.rope] == [5000.0, 1e6]


@pytest.mark.parametrize(("layers", "scale"), [(62, 8**-0.5), (61, 16**-0.5)])
def test_gemma_27b_scales_by_its_width(layers: int, scale: float, tmp_path: Path) -> None:
    """hidden size over heads, not the size of a head; it is known by its 62 layers."""
    path = write_gguf(make("Gemma3", head_dim=16, num_hidden_layers=layers), tmp_path / "model.gguf")
    config = resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache")).config
    assert config is not None
    assert config.attention_scale == pytest.approx(scale)


def test_gemma_with_softcapping_is_refused(tmp_path: Path) -> None:
    model = make("Gemma3", head_dim=16)
    path = write_gguf(model, tmp_path / "model.gguf", more={"gemma3.final_logit_softcapping": 30.0})
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        resolve(str(path), dtype=torch.float32, store=Store(tmp_path / "cache"))
