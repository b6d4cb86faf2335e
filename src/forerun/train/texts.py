"""Texts to learn from, and a model's pass over whole texts.

`Transformer.forward_rows` is for inference: it keeps a cache, works in place and may have laid the weights out anew.
The pass here uses the same modules, has no cache and can be differentiated. Texts of a batch are padded at their end,
where under a causal mask nothing that counts can see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.config import Rope
from forerun.models.rope import angles, rotate
from forerun.models.transformer import MLP, DecoderLayer, SelfAttention, Transformer

Turns = dict[Rope, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Text:
    """What was asked and what the target answered, in tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class TextBatch:
    tokens: Tensor  # [B, T]
    wanted: Tensor  # [B, T], true where the next token is one of the answer

    @classmethod
    def pack(cls, texts: Sequence[Text], device: torch.device | str = "cpu") -> TextBatch:
        longest = max(len(text.tokens) for text in texts)
        tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
        wanted = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
            wanted[row, len(text.prompt) - 1 : len(text.tokens) - 1] = True
        return cls(tokens.to(device), wanted.to(device))


def states(model: Transformer, tokens: Tensor) -> Tensor:
    """tokens [B, T] → [B, T, H], what the head reads."""
    assert model.amx is None, "the weights are there as checkpoints have them"
    x = model.model.embed_tokens(tokens)
    if model.config.embedding_scale != 1:
        x = x * torch.tensor(model.config.embedding_scale, dtype=x.dtype)  # rounded, as the family does
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    ropes = {layer.rope for layer in model.config.layers if layer.rope is not None}
    turns = {rope: angles(rope, model.config.head_dim, positions, x.dtype) for rope in ropes}
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        x = _layer(layer, x, turns)
    normed: Tensor = model.model.norm(x)
    return normed


def logits(model: Transformer, states: Tensor) -> Tensor:
    """[..., H] → [..., V]."""
    return functional.linear(states, model.lm_head.weight)


def _layer(layer: DecoderLayer, x: Tensor, turns: Turns) -> Tensor:
    attended = _attend(layer.self_attn, layer.input_layernorm(x), turns)
    if not layer.sandwich:
        x = x + attended
        return x + _feed(layer, layer.post_attention_layernorm(x))
    x = x + layer.post_attention_layernorm(attended)
    fed: Tensor = layer.post_feedforward_layernorm(_feed(layer, layer.pre_feedforward_layernorm(x)))
    return x + fed


def _attend(attention: SelfAttention, x: Tensor, turns: Turns) -> Tensor:
    count, length, _ = x.shape
    q = attention.q_proj(x).view(count, length, attention.heads, attention.head_dim)
    k = attention.k_proj(x).view(count, length, attention.kv_heads, attention.head_dim)
    v = attention.v_proj(x).view(count, length, attention.kv_heads, attention.head_dim)
    if attention.qk_norm:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.rope is not None:
        cos, sin = (part.to(q.dtype) for part in turns[attention.rope])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    seen = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).to(q.dtype),
        v.transpose(1, 2).to(q.dtype),
        attn_mask=_window(attention.window, length, x.device),
        is_causal=attention.window is None,
        scale=attention.scale,
        enable_gqa=attention.heads != attention.kv_heads,
    )
    out: Tensor = attention.o_proj(seen.transpose(1, 2).reshape(count, length, -1))
    return out


def _window(window: int | None, length: int, device: torch.device) -> Tensor | None:
    """[T, T], true where a token sees another; None for a plain causal mask."""
    if window is None:
        return None
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
