"""Rotary positions against transformers: the frequencies themselves, and angles far out in a short number format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.models.hf_config import config_from_hf
from forerun.models.rope import angles, frequencies

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    # its slowest dimension turns more than once, so that the ramp ends beyond the last one
    "yarn, fast": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, betas": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_beyond_the_first_context(kind: str, dtype: torch.dtype) -> None:
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(KINDS[kind])
    )
    rope = config_from_hf(theirs.to_dict()).layers[0].rope
    assert rope is not None
    embedding = LlamaRotaryEmbedding(theirs)
    per_position, scale = frequencies(rope, 16)
    assert torch.allclose(per_position, embedding.inv_freq, rtol=1e-6)
    assert scale == pytest.approx(embedding.attention_scaling)
    positions = torch.arange(0, 2048, 13)
    cos, sin = angles(rope, 16, positions, dtype)
    assert torch.equal(sin[..., :8], -sin[..., 8:])
    for ours, expected in zip(
        (cos[..., 8:], sin[..., 8:]), embedding(torch.ones(1, dtype=dtype), positions[None]), strict=True
    ):
        tolerance = 2e-3 if dtype == torch.float32 else 1e-2  # one step of bfloat16 just below 1
        assert (ours[:, 0].float() - expected[0, :, :8].float()).abs().max() < tolerance
