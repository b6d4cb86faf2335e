"""The one description of a transformer, whatever family it comes from: every difference is a field here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys. `factor` and what follows it serve the scaled kinds only."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    """llama3, yarn: the context length the model was first trained for."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: scales cos and sin; by default 0.1·ln(factor) + 1."""


@dataclass(frozen=True)
class Layer:
    """What one decoder layer does differently from another."""

    rope: Rope | None = Rope()
    """None for a layer without positions (SmolLM3)."""
    window: int | None = None
    """A token sees this many tokens, itself included; None for all."""
    experts: bool = False
    """A mixture of experts instead of one MLP."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    context_length: int
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias after attention."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each head's query and key (Qwen3, Gemma-3)."""
    norm_offset: float = 0.0
    """Added to the weights of RMS norms (1 for Gemma)."""
    sandwich_norms: bool = False
    """Norms after attention and MLP too, before the residual is added (Gemma)."""
    input_norms: bool = True
    """A norm before attention; an EAGLE head has none."""
    final_norm: bool = True
    """A norm before the output head; an EAGLE head foresees states that are normed already."""
    reads_beside: bool = False
    """Attention reads the token's embedding beside the hidden state, each with a norm of its own (EAGLE-3)."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Of q·k; 1/√head_dim where None."""
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """The inner width of one expert."""
    normalise_expert_weights: bool = True
    """The weights of the chosen experts sum to 1."""
    eos: tuple[int, ...] = ()
    bos: int | None = None
    family: str = "llama"
    """The `model_type` it was read from; for messages only."""
