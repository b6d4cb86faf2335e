"""Rotary positions (Su et al., 2021) and the ways they are stretched to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.models.config import Rope


def frequencies(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
    """[head_dim / 2] angles per position, and the factor that cos and sin are scaled by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, head_dim)


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow waves are stretched, fast ones kept, those between are blended by their wavelength."""
    wavelength = 2 * math.pi / plain
    slow = rope.original_context / rope.low_frequency_factor
    fast = rope.original_context / rope.high_frequency_factor
    smooth = (rope.original_context / wavelength - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(wavelength > slow, plain / rope.factor, torch.where(wavelength < fast, plain, blended))


def _yarn(plain: Tensor, rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): the blend is a ramp over dimensions, between those that turn `beta_fast` and
    `beta_slow` times within the original context."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    steps = torch.arange(plain.shape[0], dtype=torch.float32, device=plain.device)
    stretched = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * stretched + plain * (1 - stretched), scale


def angles(rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies by, [R, 1, head_dim] each, for positions [R]; the angles themselves are float32."""
    per_position, scale = frequencies(rope, head_dim, positions.device)
    turned = positions[:, None, None].float() * per_position
    cos, sin = (turned.cos() * scale).to(dtype), (turned.sin() * scale).to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, heads, head_dim]: dimension i turns with dimension i + head_dim / 2, whose sine has the other sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
