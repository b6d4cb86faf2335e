"""The layers of a model over the rows of a bucket: fused kernels, no look at the host, the same launches every time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from forerun.kernels.attention import PackedRows, tree_attention
from forerun.kernels.product import gated_product, skinny_product
from forerun.kernels.product import supports as supports_few
from forerun.kernels.rows import rms_norm, silu_mul, write_and_rotate
from forerun.models.config import ModelConfig, Rope
from forerun.models.norm import RMSNorm
from forerun.models.product import Product
from forerun.models.rope import angles
from forerun.models.static.buffers import Bucket
from forerun.models.storage import Storage

if TYPE_CHECKING:
    from forerun.models.transformer import MLP, DecoderLayer, SelfAttention, Transformer


def supports(config: ModelConfig) -> bool:
    """A mixture of experts asks the host who goes where."""
    return not any(layer.experts for layer in config.layers)


@dataclass(frozen=True)
class Result:
    """As in `Output`, for all rows of a bucket."""

    logits: Tensor
    likeliest: Tensor
    features: dict[int, Tensor] = field(default_factory=dict)


class PassRows(Protocol):
    """What a pass reads. All of it keeps its place, or is made anew on the device by the same launches."""

    @property
    def bucket(self) -> Bucket: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def wanted(self) -> Tensor: ...
    @property
    def features(self) -> Tensor | None: ...
    @property
    def packed(self) -> PackedRows: ...


class Rows:
    """A model, with what its passes share."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config
        self.turns: dict[Rope, tuple[Tensor, Tensor]] = {}
        half = self.config.head_dim // 2
        positions = torch.arange(self.config.context_length, device=model.device)
        for rope in {layer.rope for layer in self.config.layers if layer.rope is not None}:
            cos, sin = angles(rope, self.config.head_dim, positions, model.dtype)
            self.turns[rope] = cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    def run(self, buffers: PassRows, storage: Storage) -> Result:
        h, features = self.states(buffers, storage)
        logits = scores(self.model.head, h.index_select(0, buffers.wanted))
        best, likeliest = logits.max(-1)
        return Result(logits, likeliest.masked_fill_(~best.isfinite(), -1), features)

    def states(self, buffers: PassRows, storage: Storage) -> tuple[Tensor, dict[int, Tensor]]:
        """What the output head reads, and the states behind the layers that are wanted.

        x is the residual stream, h the normed rows that the next product takes. A norm adds what the product before it
        made to x, on its way."""
        bucket, model = buffers.bucket, self.model.model
        x, beside = self.model.enter(buffers.tokens, buffers.features)
        features: dict[int, Tensor] = {}
        running = [i for i in range(len(model.layers)) if bucket.only is None or i in bucket.only]
        made: Tensor | None = None  # by the layer before, not yet added to x
        mixed = x.new_empty(bucket.rows, self.config.heads * self.config.head_dim)
        for index in range(len(model.layers) + 1):
            if index in bucket.layers:
                features[index] = x.clone() if made is None else x + made
            if index in running:
                layer: DecoderLayer = model.layers[index]  # type: ignore[assignment]
                h = self._norm(x, layer.hidden_norm if layer.beside else layer.input_layernorm, made)
                if layer.beside:
                    assert beside is not None
                    h = torch.cat([self._norm(beside, layer.input_layernorm), h], 1)
                made = self._layer(layer, x, h, buffers, storage, index, mixed)
        return self._norm(x, model.norm, made), features

    def _layer(
        self, layer: DecoderLayer, x: Tensor, h: Tensor, buffers: PassRows, storage: Storage, index: int, mixed: Tensor
    ) -> Tensor:
        """What the layer adds to x at its end; what its attention adds is added here."""
        attention, config = layer.self_attn, self.config
        cos, sin = (None, None) if attention.rope is None else self.turns[attention.rope]
        q = write_and_rotate(
            _multiplied(attention.qkv, h),
            storage.keys[index],
            storage.values[index],
            buffers.positions,
            buffers.slots,
            cos=cos,
            sin=sin,
            q_norm=attention.q_norm.weight if attention.qk_norm else None,
            k_norm=attention.k_norm.weight if attention.qk_norm else None,
            eps=config.norm_eps,
            offset=config.norm_offset,
        )
        self.attend(attention, q, storage.keys[index], storage.values[index], buffers, mixed)
        added = _multiplied(attention.out, mixed)
        if layer.sandwich:
            added = self._norm(added, layer.post_attention_layernorm)
            h = self._norm(x, layer.pre_feedforward_layernorm, added)
        else:
            h = self._norm(x, layer.post_attention_layernorm, added)
        mlp: MLP = layer.mlp  # type: ignore[assignment]
        made = _multiplied(mlp.down, _gated(mlp.gate_up, h, config.activation))
        return self._norm(made, layer.post_feedforward_layernorm) if layer.sandwich else made

    def attend(
        self, attention: SelfAttention, q: Tensor, keys: Tensor, values: Tensor, buffers: PassRows, out: Tensor
    ) -> None:
        """q [R, heads, D] over a layer's cache → out [R, heads · D]."""
        tree_attention(q, keys, values, buffers.packed, scale=attention.scale, window=attention.window, out=out)

    def _norm(self, x: Tensor, norm: nn.Module, plus: Tensor | None = None) -> Tensor:
        if not isinstance(norm, RMSNorm):  # a head that has none here
            return x if plus is None else x.add_(plus)
        return rms_norm(x, norm.weight, norm.eps, residual=plus, offset=norm.offset)


def _multiplied(product: Product, x: Tensor) -> Tensor:
    """Few rows by a kernel that reads the weight as fast as it can be read, and gives a row the same bits whatever rows
    are beside it: so a tree has the rows of plain decoding, up to their attention."""
    weight, bias = product.matrix()
    return skinny_product(x, weight, bias) if supports_few(x.shape[0], weight) else product(x)


def scores(head: Product, x: Tensor) -> Tensor:
    """Logits [W, V] in float32, not rounded to the model's own precision: at the size of logits bfloat16 has steps of
    an eighth, and the two best tokens tie all the time."""
    weight, bias = head.matrix()
    if x.dtype == torch.float32:
        return head(x)
    if supports_few(x.shape[0], weight):
        return skinny_product(x, weight, bias, out=x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32))
    if x.is_cuda and bias is None:
        product: Tensor = torch.mm(x, weight.T, out_dtype=torch.float32)
        return product
    return head(x).float()


def _gated(product: Product, x: Tensor, activation: str) -> Tensor:
    weight, bias = product.matrix()
    if supports_few(x.shape[0], weight):
        return gated_product(x, weight, bias, activation=activation)
    return silu_mul(product(x), activation)
