"""A model at the cost of a larger one: its weights are placed inside a transformer of a larger shape, which computes
the same function. Real text, real acceptance and real trees can then be timed at a size that has no checkpoint here.

With h and H the two widths of the residual stream, D and D′ those of a head:

- The stream has H − h more channels, which are zero everywhere. The mean of its squares is smaller by h/H, so a norm's
  weights are multiplied by √(h/H), and eps by h/H.
- Rotation pairs dimension i with i + D/2 and turns pair j by θ^(−2j/D). Pair j of a small head becomes pair j·D′/D of a
  wide one, which turns as fast; the other dimensions are zero. Scores are divided by √D′ and not by √D, so queries are
  multiplied by √(D′/D).
- Query heads that share keys stay together. Heads, MLP units and layers beyond the small model's have random weights,
  and zeros where they would write to the stream. Layers are added behind the last one, so others keep their numbers.

Only sizes are enlarged. Vocabulary, positions, context length and activation stay the small model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.names import expected_shapes
from forerun.models.rope import frequencies
from forerun.models.transformer import Transformer
from forerun.models.widen import Axis, Noise, widen_matrix, widen_vector

SPREAD = 0.02
"""The standard deviation of weights in layers that were added: what Llama's own training starts from."""

STEP = 128
"""An MLP that is narrowed (see `fit`) is a multiple of this wide."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer, and nothing else about it."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        if any(layer.experts for layer in config.layers):
            raise ValueError("a shape with experts has no single MLP to enlarge to: choose one without")
        sizes = (config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim)
        return cls(*sizes, len(config.layers))

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        return 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)

    @property
    def layer_weights(self) -> int:
        return self.attention_weights + 3 * self.hidden_size * self.intermediate_size


SHAPES = {
    "llama-3-1b": Shape(2048, 8192, 32, 8, 64, 16),
    "llama-3-8b": Shape(4096, 14_336, 32, 8, 128, 32),
}
"""Llama-3.2-1B, and Llama-3-8B with its successors."""


def enlarge(
    model: Transformer,
    like: Shape | ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """A model of the shape `like` that computes what `model` does, built where it will run; by default in the type and
    on the device of `model`, which must not have run yet, since a first pass may repack its weights. A model in float32
    is rounded to `dtype` once, after scaling."""
    if model.prepared:
        raise ValueError("this model has run, and its weights may be packed for that: load it again, and enlarge that")
    weights = model.state_dict()
    for name, shape in expected_shapes(model.config).items():
        tensor = weights.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.is_meta:
            raise ValueError(f"this model has no whole {name}: load it again, and enlarge that")
    wide = enlarged_config(model.config, like)
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    tensors = dict(enlarged_tensors(weights, model.config, wide, seed=seed, dtype=dtype, device=device))
    with torch.device("meta"):
        large = Transformer(wide)
    if wide.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    large.load_state_dict(tensors, assign=True)
    if wide.tied:
        large.tie()
    return large.requires_grad_(False).eval()


# --- what fits ------------------------------------------------------------------------------------------------


def fit(small: Shape, like: Shape) -> Shape:
    """`like`, or where it has fewer layers than `small` a shape of as many weights: the layers of `small`, with an MLP
    that is narrower for it. Layers follow upon each other, so two of them never fit into one."""
    if like.layers >= small.layers:
        return like
    budget = like.layers * like.layer_weights / small.layers - like.attention_weights
    inner = round(budget / (3 * like.hidden_size) / STEP) * STEP
    if inner < small.intermediate_size:
        raise ValueError(
            f"{like.layers} layers of that shape have too few weights for {small.layers} layers that hold the model's: "
            "choose a larger shape"
        )
    return replace(like, layers=small.layers, intermediate_size=inner)


def enlarged_config(config: ModelConfig, like: Shape | ModelConfig) -> ModelConfig:
    """Of the large model, once everything is known to fit."""
    if any(layer.experts for layer in config.layers):
        raise ValueError("a mixture of experts cannot be enlarged: take a model without experts")
    if config.sandwich_norms or config.norm_offset:
        raise ValueError(f"a model of the family {config.family} cannot be enlarged: take a Llama, Mistral or Qwen")
    small = Shape.of(config)
    wide = fit(small, Shape.of(like) if isinstance(like, ModelConfig) else like)
    for what, least, most in (
        ("a width of", small.hidden_size, wide.hidden_size),
        ("an MLP of", small.intermediate_size, wide.intermediate_size),
        ("heads of size", small.head_dim, wide.head_dim),
    ):
        if most < least:
            raise ValueError(f"the shape has {what} {most}, and the model {least}: choose a shape with at least that")
    needed = small.kv_heads * _copies(small, wide)
    if needed > wide.kv_heads:
        raise ValueError(
            f"the shape has {wide.heads} heads with {wide.kv_heads} for keys and values, and the model's {small.heads} "
            f"heads need {needed} of those: choose a shape with more"
        )
    _check_positions(config, wide)
    return replace(
        config,
        hidden_size=wide.hidden_size,
        intermediate_size=wide.intermediate_size,
        heads=wide.heads,
        kv_heads=wide.kv_heads,
        head_dim=wide.head_dim,
        layers=config.layers + (wide.layers - small.layers) * config.layers[-1:],
        norm_eps=config.norm_eps * config.hidden_size / wide.hidden_size,
    )


def _check_positions(config: ModelConfig, wide: Shape) -> None:
    """That every pair of a small head has one in a wide head that turns as fast."""
    if wide.head_dim % config.head_dim:
        raise ValueError(
            f"heads of size {config.head_dim} do not fit into heads of {wide.head_dim}: choose a shape whose heads are "
            f"{config.head_dim} wide, or a multiple of it"
        )
    step = wide.head_dim // config.head_dim
    for rope in {layer.rope for layer in config.layers if layer.rope is not None}:
        turns, scale = frequencies(rope, config.head_dim)
        wide_turns, wide_scale = frequencies(rope, wide.head_dim)
        if scale != wide_scale or not torch.allclose(wide_turns[::step], turns, rtol=1e-6, atol=0):
            raise ValueError(
                f"positions of the kind {rope.kind} turn otherwise in wider heads: choose a shape whose heads are "
                f"{config.head_dim} wide"
            )


def _copies(small: Shape, wide: Shape) -> int:
    """Wide key-value heads for one small one: more than one where fewer query heads share it."""
    return -(-small.group // wide.group)


# --- where it goes --------------------------------------------------------------------------------------------


def _dims(small: int, wide: int) -> list[int | None]:
    """Which dimension of a small head lies at each of a wide one."""
    entries: list[int | None] = [None] * wide
    for half in (0, 1):
        for pair in range(small // 2):
            entries[half * wide // 2 + pair * (wide // small)] = half * small // 2 + pair
    return entries


def _heads(taken: Mapping[int, int], count: int, small: int, wide: int) -> Axis:
    """All dimensions of `count` wide heads; `taken` says which small head lies in which of them. A head is free where
    none does. In the others what is left of their dimensions is zero: queries and keys meet there."""
    dims = _dims(small, wide)
    entries: list[int | None] = []
    for head in range(count):
        base = taken.get(head)
        entries += [None if base is None or dim is None else base * small + dim for dim in dims]
    return Axis.of(entries, [head not in taken for head in range(count) for _ in dims])


@dataclass(frozen=True)
class Places:
    """Where the sides of the small model's matrices lie in the large one's."""

    tokens: Axis
    stream: Axis
    queries: Axis
    keys: Axis
    dims: Axis
    units: Axis

    @classmethod
    def between(cls, small: ModelConfig, wide: ModelConfig) -> Places:
        few, many = Shape.of(small), Shape.of(wide)
        copies, sizes = _copies(few, many), (small.head_dim, wide.head_dim)
        queries = {
            (group * copies + index // many.group) * many.group + index % many.group: group * few.group + index
            for group in range(small.kv_heads)
            for index in range(few.group)
        }
        keys = {head: head // copies for head in range(small.kv_heads * copies)}
        return cls(
            tokens=Axis.first(small.vocab_size, small.vocab_size),
            stream=Axis.first(small.hidden_size, wide.hidden_size),
            queries=_heads(queries, wide.heads, *sizes),
            keys=_heads(keys, wide.kv_heads, *sizes),
            dims=Axis.of(_dims(*sizes)),
            units=Axis.first(small.intermediate_size, wide.intermediate_size),
        )

    def sides(self, module: str) -> tuple[Axis, Axis]:
        """Rows and columns of a linear map. What reads the stream may have anything in columns that meet zeros; what
        writes to it has zeros for other channels, and for inputs that are noise."""
        match module:
            case "embed_tokens":
                return self.tokens, self.stream.closed()
            case "lm_head":
                return self.tokens, self.stream
            case "q_proj":
                return self.queries, self.stream
            case "k_proj" | "v_proj":
                return self.keys, self.stream
            case "o_proj":
                return self.stream.closed(), self.queries.closed()
            case "gate_proj" | "up_proj":
                return self.units, self.stream
            case "down_proj":
                return self.stream.closed(), self.units.closed()
        raise AssertionError(f"{module} is of no model that can be enlarged")


def scales_between(small: ModelConfig, wide: ModelConfig) -> dict[str, float]:
    """What the weights of a module are multiplied with, where that is not 1.

    Queries and keys with norms of their own: those share the one eps. Scaled by c, a padded query q of mean square m
    becomes √(D′/D)·q / √(m + eps′·D′/(D·c²)), so c² = (eps′/eps)·(D′/D) = (h/H)·(D′/D) keeps eps, and the norm's
    weights take the rest: √(D/D′), times √(D′/D) for queries as without norms.
    """
    width = small.hidden_size / wide.hidden_size
    head = wide.head_dim / small.head_dim
    score = 1.0 if small.attention_scale is not None else math.sqrt(head)
    scales = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), math.sqrt(width))
    if not small.qk_norm:
        return {**scales, "q_proj": score}
    inner = math.sqrt(width * head)
    return {**scales, "q_proj": inner, "k_proj": inner, "q_norm": score / math.sqrt(head), "k_norm": head**-0.5}


def enlarged_tensors(
    weights: Mapping[str, Tensor],
    small: ModelConfig,
    wide: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the large model, one at a time, in the order of `expected_shapes(wide)`. `weights` are the small
    model's, `wide` is its `enlarged_config`."""
    places, scales, noise = Places.between(small, wide), scales_between(small, wide), Noise(seed, dtype, device)
    present = expected_shapes(small)
    for name, shape in expected_shapes(wide).items():
        module, kind = name.split(".")[-2:]
        scale = scales.get(module, 1.0)
        if name not in present:
            yield name, _added(module, kind, shape, scale, noise)
        elif module.endswith("norm"):
            axis = places.dims if module in ("q_norm", "k_norm") else places.stream
            yield name, widen_vector(weights[name], axis, noise, scale, spare=scale)
        elif kind == "bias":
            yield name, widen_vector(weights[name], places.sides(module)[0], noise, scale)
        else:
            yield name, widen_matrix(weights[name], *places.sides(module), noise, scale)


def _added(module: str, kind: str, shape: tuple[int, ...], scale: float, noise: Noise) -> Tensor:
    """Of a layer that the small model does not have: it computes something, and adds zeros to the stream."""
    if module.endswith("norm"):
        return torch.full(shape, scale, dtype=noise.dtype, device=noise.device)
    if kind == "bias" or module in ("o_proj", "down_proj"):
        return torch.zeros(shape, dtype=noise.dtype, device=noise.device)
    return noise.block(shape[0], shape[1], SPREAD)
