"""A model's pass over whole texts, which can be differentiated.

`Transformer.forward_rows` is for inference: it keeps a cache, works in place and may have laid the weights out anew.
The pass here uses the same modules and has no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.config import ModelConfig, Rope
from forerun.models.rope import angles, rotate
from forerun.models.transformer import MLP, DecoderLayer, SelfAttention, Transformer

Turns = dict[Rope, tuple[Tensor, Tensor]]
"""What positions turn queries and keys by: cos and sin, each [B or 1, L, 1, head_dim]."""
Attend = Callable[[SelfAttention, Tensor, Tensor, Tensor], Tensor]
"""q [B, L, heads, D], k and v [B, L, kv_heads, D], turned → what the queries find, [B, L, heads, D]."""


@dataclass(frozen=True)
class States:
    normed: Tensor  # [B, L, H] what the output head reads
    behind: dict[int, Tensor]  # [B, L, H] the hidden states behind so many layers; 0 is the embedding


def states(model: Transformer, tokens: Tensor, layers: Iterable[int] = (), attend: Attend | None = None) -> States:
    """tokens [B, L] → the states behind those layers, and the last ones. Under `attend`, by default a causal mask."""
    assert model.in_c is None, "the weights are there as checkpoints have them"
    wanted = frozenset(layers)
    x = model.embed(tokens)
    # The sum that layers add to has the model's own precision: a draft may read with the embedding of another model.
    x = x.to(torch.promote_types(x.dtype, model.dtype))
    turns = turns_of(model.config, torch.arange(tokens.shape[1], device=tokens.device), x.dtype)
    behind: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        if index in wanted:
            behind[index] = x
        x = through(layer, x, turns, attend or causal)
    if len(model.model.layers) in wanted:
        behind[len(model.model.layers)] = x
    return States(model.model.norm(x), behind)


def embedded(model: Transformer, rows: Tensor) -> Tensor:
    """What goes into the first layer, of rows of the embedding."""
    if model.config.embedding_scale != 1:
        return rows * torch.tensor(model.config.embedding_scale, dtype=rows.dtype)  # rounded, as the family does
    return rows


def turns_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Turns:
    """positions [L] or [B, L]."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    shape = (*positions.shape, 1, config.head_dim)
    flat = {rope: angles(rope, config.head_dim, positions.reshape(-1), dtype) for rope in ropes}
    return {rope: (cos.view(shape), sin.view(shape)) for rope, (cos, sin) in flat.items()}


def through(layer: DecoderLayer, x: Tensor, turns: Turns, attend: Attend, beside: Tensor | None = None) -> Tensor:
    """x [B, L, H] → [B, L, H]; `beside` is what attention reads besides, in a layer that takes it."""
    attended = _attention(layer.self_attn, layer.attended(x, beside), turns, attend)
    if not layer.sandwich:
        x = x + attended
        return x + _feed(layer, layer.post_attention_layernorm(x))
    x = x + layer.post_attention_layernorm(attended)
    fed: Tensor = layer.post_feedforward_layernorm(_feed(layer, layer.pre_feedforward_layernorm(x)))
    return x + fed


def causal(attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = attention.window
    return masked(attention, q, k, v, None if window is None else _window(window, q.shape[1], q.device))


def masked(attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """`visible` is true where a query sees a key, and can be spread to [B, heads, queries, keys]; None for causal."""
    seen = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        scale=attention.scale,
        enable_gqa=attention.heads != attention.kv_heads,
    )
    return seen.transpose(1, 2)


def _attention(attention: SelfAttention, x: Tensor, turns: Turns, attend: Attend) -> Tensor:
    count, length, _ = x.shape
    q = attention.q_proj(x).view(count, length, attention.heads, attention.head_dim)
    k = attention.k_proj(x).view(count, length, attention.kv_heads, attention.head_dim)
    v = attention.v_proj(x).view(count, length, attention.kv_heads, attention.head_dim)
    if attention.qk_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.rope is not None:
        cos, sin = (part.to(q.dtype) for part in turns[attention.rope])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    seen = attend(attention, q, k.to(q.dtype), v.to(q.dtype))
    out: Tensor = attention.o_proj(seen.reshape(count, length, -1))
    return out


def _window(window: int, length: int, device: torch.device) -> Tensor:
    """[L, L], true where a token sees another."""
    places = torch.arange(length, device=device)
    back = places[:, None] - places
    return (back >= 0) & (back < window)


def _feed(layer: DecoderLayer, x: Tensor) -> Tensor:
    mlp = layer.mlp
    if not isinstance(mlp, MLP):  # experts take rows
        rows: Tensor = mlp(x.flatten(0, 1))
        return rows.view_as(x)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    gate = functional.silu(gate) if mlp.silu else functional.gelu(gate, approximate="tanh")
    out: Tensor = mlp.down_proj(gate * up)
    return out
