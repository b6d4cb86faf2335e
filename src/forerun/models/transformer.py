"""The transformer: one implementation for every family that `ModelConfig` can describe.

Parameters have the names that checkpoints give them. Before the first pass those that are multiplied with the same
input are laid side by side in memory, so that one product makes queries, keys and values, and one makes gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.attention import Attention
from forerun.models.batch import Batch
from forerun.models.config import Layer, ModelConfig, Rope
from forerun.models.moe import MixtureOfExperts
from forerun.models.rope import angles, rotate
from forerun.models.storage import LayerShape, Storage
from forerun.models.target import Output


@dataclass(frozen=True)
class Pass:
    """What all layers of one pass share."""

    attention: Attention
    angles: dict[Rope, tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, size: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = config.norm_eps
        self.offset = config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:  # Gemma multiplies in float32, the others after rounding
            return (wide * (self.offset + self.weight.float())).to(x.dtype)
        return wide.to(x.dtype) * self.weight


class SideBySide:
    """Several linear layers of one input as one product. Their weights become views of one matrix."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.parts = parts
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def fuse(self) -> None:
        widths = [part.out_features for part in self.parts]
        self.weight = torch.cat([part.weight.data for part in self.parts])
        for part, weight in zip(self.parts, torch.split(self.weight, widths), strict=True):
            part.weight.data = weight
        if self.parts[0].bias is not None:
            self.bias = torch.cat([part.bias.data for part in self.parts])
            for part, bias in zip(self.parts, torch.split(self.bias, widths), strict=True):
                part.bias.data = bias

    def __call__(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "fuse first"
        return functional.linear(x, self.weight, self.bias)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.index, self.rope, self.window = index, layer.rope, layer.window
        self.scale = config.attention_scale or config.head_dim**-0.5
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config)
            self.k_norm = RMSNorm(self.head_dim, config)
        self.qkv = SideBySide(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """x [R, H] → [R, H]."""
        heads = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], 1)
        if self.qk_norm:
            q, k = torch.split(qk, [self.heads, self.kv_heads], 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        if self.rope is not None:
            qk = rotate(qk, *shared.angles[self.rope])
        q, k = torch.split(qk, [self.heads, self.kv_heads], 1)
        return self.o_proj(shared.attention.attend(self.index, q, k, v, window=self.window, scale=self.scale))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.silu = config.activation == "silu"
        self.gate_up = SideBySide(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate = functional.silu(gate) if self.silu else functional.gelu(gate, approximate="tanh")
        return self.down_proj(gate * up)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer, index)
        self.mlp = MixtureOfExperts(config) if layer.experts else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config)

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), shared)
        if not self.sandwich:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(mixed)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, i) for i, layer in enumerate(config.layers))
        self.norm = RMSNorm(config.hidden_size, config)


class Transformer(nn.Module):
    """A `TargetModel`. Build it under `torch.device("meta")` to give it the tensors of a checkpoint."""

    branches = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.eos = frozenset(config.eos)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.tie()
        self.fused = False

    def tie(self) -> None:
        """Make the embedding the output head too; to be done again when it was replaced by another tensor."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def fuse(self) -> None:
        """Once, when the weights are there and where they stay."""
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.qkv.fuse()
            elif isinstance(module, MLP):
                module.gate_up.fuse()
        self.fused = True

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def new_storage(self, slots: int) -> Storage:
        shape = LayerShape(self.config.kv_heads, self.config.head_dim, self.config.head_dim)
        return Storage.make([shape] * len(self.config.layers), slots, self.dtype, self.device)

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return prompt

    def forget(self, sequence: int) -> None:
        """Nothing is kept outside of the cache."""

    @torch.inference_mode()
    def forward_rows(
        self, batch: Batch, storage: Storage, layers: Sequence[int] = (), only: Sequence[int] | None = None
    ) -> Output:
        """With `only`, the other layers are skipped: what the rest makes of the rows, at its share of the cost."""
        if not self.fused:
            self.fuse()
        features: dict[int, Tensor] = {}
        shared = self._shared(batch, storage)
        x = self.model.embed_tokens(batch.tokens)
        if self.config.embedding_scale != 1:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded, as the family does
        for index, layer in enumerate(self.model.layers):
            if index in layers:
                features[index] = x
            if only is None or index in only:
                x = layer(x, shared)
        if len(self.model.layers) in layers:
            features[len(self.model.layers)] = x
        if batch.wanted is not None:
            x = x.index_select(0, batch.wanted)
        return Output(self.lm_head(self.model.norm(x)), features)

    def _shared(self, batch: Batch, storage: Storage) -> Pass:
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        turns = {rope: angles(rope, self.config.head_dim, batch.positions, self.dtype) for rope in ropes}
        return Pass(Attention(batch, storage, self.dtype), turns)
