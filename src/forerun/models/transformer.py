"""The transformer: one implementation for every family that `ModelConfig` can describe.

Parameters have the names that checkpoints give them. Before the first pass those that are multiplied with the same
input are laid side by side, so that one product makes queries, keys and values, and one makes gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.attention import Attention
from forerun.models.batch import Batch, TextEnds
from forerun.models.config import Layer, ModelConfig, Rope
from forerun.models.moe import MixtureOfExperts
from forerun.models.native import amx, floats
from forerun.models.native.in_c import Arithmetic, LayerWeights, PassInC, weights_read
from forerun.models.native.reading import Reading
from forerun.models.norm import RMSNorm
from forerun.models.product import Product, drop
from forerun.models.rope import angles, rotate
from forerun.models.static.rows import supports
from forerun.models.static.static_pass import Choose, StaticPass
from forerun.models.storage import LayerShape, Storage
from forerun.models.target import Output, Written


@dataclass(frozen=True)
class Pass:
    """What all layers of one pass share."""

    attention: Attention
    angles: dict[Rope, tuple[Tensor, Tensor]]


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.index, self.rope, self.window = index, layer.rope, layer.window
        self.scale = config.attention_scale or config.head_dim**-0.5
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        width = config.hidden_size * (2 if config.reads_beside else 1)
        self.q_proj = nn.Linear(width, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config)
            self.k_norm = RMSNorm(self.head_dim, config)
        self.qkv = Product(self.q_proj, self.k_proj, self.v_proj)
        self.out = Product(self.o_proj)

    def prepare(self) -> None:
        for product in (self.qkv, self.out):
            product.prepare()
            product.drop_parts()

    def forward(self, x: Tensor, shared: Pass, plus: Tensor | None = None) -> Tensor:
        """x [R, H] → [R, H]."""
        heads = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        qk = heads[:, : self.heads + self.kv_heads]
        if self.qk_norm:
            q, k = torch.split(qk, [self.heads, self.kv_heads], 1)
            qk.copy_(torch.cat([self.q_norm(q), self.k_norm(k)], 1))
        if self.rope is not None:
            qk.copy_(rotate(qk, *shared.angles[self.rope]))
        return self.out(shared.attention.attend(self.index, heads, window=self.window, scale=self.scale), plus)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.silu = config.activation == "silu"
        self.gate_up = Product(self.gate_proj, self.up_proj)
        self.down = Product(self.down_proj)

    def prepare(self) -> None:
        for product in (self.gate_up, self.down):
            product.prepare()
            product.drop_parts()

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate = functional.silu(gate) if self.silu else functional.gelu(gate, approximate="tanh")
        return self.down(gate.mul_(up), plus)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: Layer, index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer, index)
        self.mlp = MixtureOfExperts(config) if layer.experts else MLP(config)
        self.input_layernorm: nn.Module = RMSNorm(config.hidden_size, config) if config.input_norms else nn.Identity()
        self.beside = config.reads_beside
        if self.beside:
            self.hidden_norm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config)

    def weights(self) -> LayerWeights:
        """For the pass in C."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(mlp, MLP)
        biases = [part.bias.data for part in attention.qkv.parts if part.bias is not None]
        return LayerWeights(
            qkv=torch.cat([part.weight.data for part in attention.qkv.parts]),
            out=attention.o_proj.weight.data,
            gate=mlp.gate_proj.weight.data,
            up=mlp.up_proj.weight.data,
            down=mlp.down_proj.weight.data,
            vectors={
                "input_norm": _weight(self.hidden_norm if self.beside else self.input_layernorm),
                "beside_norm": _weight(self.input_layernorm) if self.beside else None,
                "inner_norm": self.post_attention_layernorm.weight.data,
                "q_norm": attention.q_norm.weight.data if attention.qk_norm else None,
                "k_norm": attention.k_norm.weight.data if attention.qk_norm else None,
                "qkv_bias": torch.cat(biases) if biases else None,
                "out_bias": None if attention.o_proj.bias is None else attention.o_proj.bias.data,
            },
        )

    def attended(self, x: Tensor, beside: Tensor | None) -> Tensor:
        """What attention reads: x [R, H], normed, behind the embeddings where the layer takes both."""
        if not self.beside:
            normed: Tensor = self.input_layernorm.forward(x)
            return normed
        assert beside is not None
        return torch.cat([self.input_layernorm.forward(beside), self.hidden_norm.forward(x)], -1)

    def forward(self, x: Tensor, shared: Pass, beside: Tensor | None = None) -> Tensor:
        if not self.sandwich:
            x = self.self_attn.forward(self.attended(x, beside), shared, x)
            return self.mlp.forward(self.post_attention_layernorm.forward(x), x)
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), shared))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, i) for i, layer in enumerate(config.layers))
        self.norm: nn.Module = RMSNorm(config.hidden_size, config) if config.final_norm else nn.Identity()


def _weight(norm: nn.Module) -> Tensor | None:
    """None for no norm at all."""
    return norm.weight.data if isinstance(norm, RMSNorm) else None


class Transformer(nn.Module):
    """A `TargetModel`. Build it under `torch.device("meta")` to give it the tensors of a checkpoint."""

    branches = True
    only_drafts = False
    """What it says is checked by another model, so its weights may be rounded where that is faster."""
    rounds = False
    """Its rows may be rounded to 16 bits where matrices lie in 4 or 8."""
    learned_through = False
    """Somebody computes through its modules, so their matrices stay as checkpoints have them."""
    ids: Tensor | None = None
    """[vocab_size] the target's id of each column of the logits, where a draft speaks fewer tokens than it reads."""
    feature_like: Tensor | None = None
    """[H] like what a row brings besides its token, where the model takes something."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.reads = config.vocab_size
        """How many tokens it knows as input."""
        self.eos = frozenset(config.eos)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.tie()
        self.head = Product(self.lm_head)
        self.in_c: PassInC | None = None
        self.static: StaticPass | None = None
        self.extra: Tensor | None
        self.register_buffer("extra", None, persistent=False)
        self.prepared = False
        self._place: tuple[torch.device, torch.dtype] | None = None

    @property
    def folded(self) -> bool:
        """Whether going by its weights takes less than half as long as if they were kept as they are."""
        return self.in_c is not None and 2 * self.in_c.weights_time < weights_read(self.config)

    @property
    def rounded(self) -> bool:
        """Whether rows have 16 bits where they are multiplied."""
        return self.in_c is not None and self.in_c.rounded

    def tie(self) -> None:
        """Make the embedding the output head too; to be done again when it was replaced by another tensor."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def prepare(self) -> None:
        """Once, when the weights are there and where they stay."""
        self._place = self._any_norm.weight.device, self._any_norm.weight.dtype
        if arithmetic := self._arithmetic():
            self.in_c = self._packed(arithmetic)
            self.prepared = True
            return
        for module in self.modules():
            if isinstance(module, SelfAttention | MLP | RMSNorm):
                module.prepare()
        self.head.prepare()
        if not self.config.tied:
            self.head.drop_parts()
        if self.device.type == "cuda" and supports(self.config):
            self.static = StaticPass(self)
        self.prepared = True

    def _arithmetic(self) -> Arithmetic | None:
        """What its passes in C are computed with, where there are any."""
        if self.learned_through:
            return None
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and amx.supports(self.config):
            return amx.arithmetic()
        if self.device.type == "cpu" and self.dtype == torch.float32 and floats.supports(self.config):
            return replace(floats.arithmetic(), rounds=(self.rounds or self.only_drafts) and floats.rounds())
        return None

    def _packed(self, arithmetic: Arithmetic) -> PassInC:
        """The weights in the order of the pass in C. The matrices are dropped one by one as they are copied."""

        def layers() -> Iterator[LayerWeights]:
            for layer in self.model.layers:
                assert isinstance(layer, DecoderLayer)
                yield layer.weights()
                for part in layer.modules():
                    if isinstance(part, nn.Linear):
                        drop(part)

        norm, head = _weight(self.model.norm), self.lm_head.weight.data
        packed = PassInC(self.config, layers(), norm, head, arithmetic, in_bytes=self.only_drafts)
        if not self.config.tied:
            drop(self.lm_head)
        return packed

    # Asked for several times a step, and a way of many modules to go.

    @property
    def device(self) -> torch.device:
        return self._any_norm.weight.device if self._place is None else self._place[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._any_norm.weight.dtype if self._place is None else self._place[1]

    @property
    def _any_norm(self) -> RMSNorm:
        """A weight that every model has, and keeps when others are laid out anew."""
        layer = self.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer.post_attention_layernorm

    def add_embeddings(self, extra: Tensor) -> None:
        """Make vocab_size, vocab_size + 1, … tokens that may be read, with embeddings [T, H], and never written: logits
        stay as they are. They count like rows of the embedding, and are scaled where a family scales those. Another
        call replaces them."""
        hidden = self.config.hidden_size
        if extra.dim() != 2 or not extra.shape[0] or extra.shape[1] != hidden:
            raise ValueError(f"embeddings {tuple(extra.shape)} do not fit the model: they must be [T, {hidden}], T ≥ 1")
        if self.extra is not None and self.extra.shape == extra.shape:
            self.extra.copy_(extra)  # where graphs read them, also those of heads that embed with this model
            return
        self.extra = extra.detach().to(self.device, self.dtype, copy=True)
        if self.static is not None:
            self.static.captured.clear()  # graphs name the memory that they read

    def embed(self, tokens: Tensor) -> Tensor:
        """[R] → [R, H]"""
        extra, end = self.extra, self.vocab_size
        known = tokens if extra is None else tokens.clamp_max(end - 1)
        x = functional.embedding(known, self.model.embed_tokens.weight)
        if extra is not None:
            own = functional.embedding((tokens - end).clamp(0, extra.shape[0] - 1), extra)
            x = torch.where((tokens >= end)[..., None], own, x)
        if self.config.embedding_scale != 1:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded, as the family does
        return x

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """[len(ids), H] rows of the output head, as checkpoints have them, whatever they were laid out as since."""
        if self.config.tied:
            whole = self.model.embed_tokens.weight.data[: self.vocab_size]
        elif self.in_c is not None:
            whole = self.in_c.head_matrix()
        elif self.head.packed is not None:
            whole = self.head.packed.to_dense()
        else:
            whole = self.lm_head.weight.data
        return whole if ids is None else whole[ids.to(whole.device)]

    def enter(self, tokens: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What goes into the first layer, and what attention reads beside it; `features` [R, H] are what rows bring
        besides their tokens, to a model that takes them."""
        return self.embed(tokens), None

    def new_storage(self, slots: int) -> Storage:
        shape = LayerShape(self.config.kv_heads, self.config.head_dim, self.config.head_dim)
        return Storage.make([shape] * len(self.config.layers), slots, self.dtype, self.device)

    def begin(self, sequence: int, prompt: list[int]) -> list[int]:
        return prompt

    def forget(self, sequence: int) -> None:
        """Nothing is kept outside of the cache."""

    def forward_rows(
        self, batch: Batch, storage: Storage, layers: Sequence[int] = (), only: Sequence[int] | None = None
    ) -> Output:
        """With `only`, the other layers are skipped: what the rest makes of the rows, at its share of the cost."""
        if torch.is_inference_mode_enabled():
            return self._forward_rows(batch, storage, layers, only)
        with torch.inference_mode():
            return self._forward_rows(batch, storage, layers, only)

    def _forward_rows(
        self, batch: Batch, storage: Storage, layers: Sequence[int], only: Sequence[int] | None
    ) -> Output:
        if not self.prepared:
            self.prepare()
        if self.static is not None and self.static.takes(batch):
            return self.static.forward(batch, storage, layers, only)
        batch = batch.on(self.device)
        x, beside = self.enter(batch.tokens, batch.features)
        if self.in_c is not None:
            return self.in_c.run(x, beside, Reading.of(batch), storage, layers, only)
        features: dict[int, Tensor] = {}
        shared = self._shared(batch, storage)
        for index, layer in enumerate(self.model.layers):
            if index in layers:
                features[index] = x
            if only is None or index in only:
                x = layer.forward(x, shared, beside)
        if len(self.model.layers) in layers:
            features[len(self.model.layers)] = x
        if batch.wanted is not None:
            x = x.index_select(0, batch.wanted)
        return Output(self.head(self.model.norm(x)), features)

    @property
    def writes_ahead(self) -> bool:
        return self.prepared and self.static is not None and self.static.usable

    @torch.inference_mode()
    def write_ahead(
        self,
        ends: TextEnds,
        storage: Storage,
        count: int,
        choose: Choose | None = None,
        layers: Sequence[int] = (),
        top: int = 0,
        only: Sequence[int] | None = None,
    ) -> Written:
        assert self.static is not None
        return self.static.write(ends, storage, count, choose, layers, top, only)

    def _shared(self, batch: Batch, storage: Storage) -> Pass:
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        turns = {rope: angles(rope, self.config.head_dim, batch.positions, self.dtype) for rope in ropes}
        return Pass(Attention(batch, storage, self.dtype), turns)
