"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.kernels.rows import rms_norm
from forerun.models.config import ModelConfig


class RMSNorm(nn.Module):
    def __init__(self, size: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = config.norm_eps
        self.offset = config.norm_offset
        self.mirrored: Tensor | None = None

    def prepare(self) -> None:
        """On a CPU the norm would be eight small operations, while `layer_norm` is one. A row beside its negative has
        mean zero, and as its variance the row's mean square: the first half of its `layer_norm` is the row's norm. Not
        in float32: the mean is zero but for the rounding of a sum, which outliers make felt there."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16:
            weight = self.offset + self.weight.data.float()
            self.mirrored = torch.cat([weight, torch.zeros_like(weight)])

    def forward(self, x: Tensor) -> Tensor:
        if self.mirrored is not None:
            both = torch.cat([x, x.neg()], -1)
            return torch.layer_norm(both, self.mirrored.shape, self.mirrored, None, self.eps)[..., : x.shape[-1]]
        if x.is_cuda and not torch.is_grad_enabled() and x.dtype == self.weight.dtype:
            rows = x.reshape(-1, x.shape[-1])
            return rms_norm(rows, self.weight, self.eps, offset=self.offset).view(x.shape)
        if x.dtype == self.weight.dtype == torch.float32 and not self.offset:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)  # in one call
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:  # Gemma multiplies in float32, the others after rounding
            return (wide * (self.offset + self.weight.float())).to(x.dtype)
        return wide.to(x.dtype) * self.weight
