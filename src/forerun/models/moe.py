"""A mixture of experts (Mixtral, Qwen3-MoE): a router picks a few MLPs for each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.config import ModelConfig
from forerun.models.native.rows import linear


class Experts(nn.Module):
    """All experts of a layer, stacked; the gate's rows come before those of the up projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, hidden = config.expert_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, hidden, inner))


class MixtureOfExperts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.experts = Experts(config)
        self.per_token = config.experts_per_token
        self.normalise = config.normalise_expert_weights

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [R, H]. Each expert runs once, on the rows that chose it."""
        weights = torch.softmax(linear(x, self.gate.weight).float(), -1)
        weights, chosen = weights.topk(self.per_token, -1)  # [R, k]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up = linear(x[rows], self.experts.gate_up_proj[expert]).chunk(2, -1)
            out = linear(functional.silu(gate) * up, self.experts.down_proj[expert])
            result.index_add_(0, rows, out * weights[rows, rank, None])
        return result if plus is None else plus + result
