"""Heads that foresee the target's states one after another: EAGLE, EAGLE-3 and multi-token prediction.

All three are one decoder layer that reads, for every token, the state which the target had before that token. They
differ in how the two are brought together:

    eagle    fc [embedding; state]                        a layer without input norm     head(x)
    eagle3   attention reads [norm embedding; norm state], the residual is the state     head(norm x)
             (the state: fc over three layers of the target)
    mtp      fc [norm embedding; norm state]              a layer                        head(norm x)

What the layer makes of a row stands for the target's state at that row: it gives the draft of the next token, and goes
into the next row. The token embeddings and the output head are the target's own, the head cut to the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.config import Layer, ModelConfig
from forerun.models.heads.files import HeadFolder
from forerun.models.heads.vocabulary import from_offsets, to_offsets
from forerun.models.native.growth import Entry
from forerun.models.native.in_c import weights_read
from forerun.models.native.join import Join
from forerun.models.native.rows import linear
from forerun.models.norm import RMSNorm
from forerun.models.transformer import Transformer

METHODS = ("eagle", "eagle3", "mtp")
SPREAD = 0.02
"""The standard deviation of weights that have nothing to begin with."""
MTP_PREFIX = "mtp."
PUBLISHED = "published_with_target"
"""In a head's config.json: it is a module that the target was published with, not one of ours."""
PLAIN: dict[str, Any] = {
    "sandwich_norms": False,
    "qk_norm": False,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "norm_offset": 0.0,
}
"""Our own heads are like Llama's layers, whatever the target's are: other engines expect that."""


def head_config(
    method: str,
    target: ModelConfig,
    ids: Tensor | None,
    inner: int | None = None,
    heads: tuple[int, int] | None = None,
    *,
    published: bool = False,
) -> ModelConfig:
    """A head for a target: one dense layer of its sizes. `ids` is the draft vocabulary, `inner` another MLP width,
    `heads` are other numbers of attention heads, of queries and of keys. A head that was published with the target has
    the biases and norms of the target's own layers."""
    assert method in METHODS
    turned = next(
        (layer for layer in target.layers if layer.rope is not None and layer.window is None), target.layers[0]
    )
    return replace(
        target,
        vocab_size=target.vocab_size if ids is None else ids.shape[0],
        intermediate_size=inner or target.intermediate_size,
        heads=target.heads if heads is None else heads[0],
        kv_heads=target.kv_heads if heads is None else heads[1],
        layers=(Layer(rope=turned.rope),),
        tied=False,
        embedding_scale=1.0,  # the target's own embedding has it
        experts=0,
        input_norms=method != "eagle",
        final_norm=method != "eagle",
        reads_beside=method == "eagle3",
        family=method,
        **({} if published else PLAIN),
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, counted as layers already applied."""
    return tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)}))


class FeatureHead(Transformer):
    """Rows bring the state before their token (`Batch.features`); `features[1]` of a pass is what comes next, by way
    of `next_states`."""

    only_drafts = True

    def __init__(
        self,
        method: str,
        config: ModelConfig,
        target: Transformer,
        ids: Tensor | None = None,
        taps: tuple[int, ...] | None = None,
        published: bool = False,
    ) -> None:
        super().__init__(config)
        self.method, self.published = method, published
        self.ids = ids
        layers = len(target.config.layers)
        self.taps = taps or (default_taps(layers) if method == "eagle3" else (layers,))
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden * (len(self.taps) if method == "eagle3" else 2), hidden, bias=False)
        if method == "mtp":
            self.pre_fc_norm_embedding = RMSNorm(hidden, config)
            self.pre_fc_norm_hidden = RMSNorm(hidden, config)
        del self.model.embed_tokens  # the target's is used, and is no part of this
        self.embed = target.embed  # type: ignore[method-assign]
        self.joined: Join | None = None
        """`fc` of eagle3, where the pass is in C."""
        self._target = [target]  # in a list, which hides it from PyTorch: it is not ours to train

    @property
    def feature_like(self) -> Tensor:  # type: ignore[override]
        return self._any_norm.weight

    def prepare(self) -> None:
        super().prepare()
        if self.in_c is not None and self.dtype == torch.bfloat16 and self.method == "eagle3":
            self.joined = Join(self.fc.weight.data, len(self.taps))

    @property
    def target_time(self) -> float:
        """That of its weights: see `PassInC.weights_time`."""
        target = self._target[0]
        return weights_read(target.config) if target.in_c is None else target.in_c.weights_time

    def fuse(self, states: Mapping[int, Tensor]) -> Tensor:
        """What rows bring, from the target's hidden states [..., H] behind the tapped layers."""
        if self.joined is not None:
            return self.joined([states[tap] for tap in self.taps])
        if self.method == "eagle3":
            joined = torch.cat([states[tap] for tap in self.taps], -1)
            return linear(joined.to(self.fc.weight.dtype), self.fc.weight)
        normed: Tensor = self._target[0].model.norm(states[self.taps[0]])
        return normed.to(self.dtype)

    def enter(self, tokens: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert features is not None, "rows of a head bring the state before their token"
        return self.combine(self.embed(tokens).to(features.dtype), features)

    def combine(self, embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., H] each: what goes into the layer, and what its attention reads beside it."""
        if self.method == "eagle3":
            return features.clone(), embedding  # the pass adds to what it is given
        if self.method == "mtp":
            embedding, features = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(features)
        return linear(torch.cat([embedding, features], -1), self.fc.weight), None

    def next_states(self, made: Tensor) -> Tensor:
        """[..., H] behind the layer → what the rows below bring. Modules that come with a target hand on what the
        output head reads; ours are trained to hand on what the layer made."""
        if not self.published:
            return made
        normed: Tensor = self.model.norm(made)
        return normed

    def entry(self) -> Entry | None:
        """How rows begin, for a tree that grows in C; None where that does more than C does."""
        target = self._target[0]
        embedding = target.model.embed_tokens.weight
        plain = target.config.embedding_scale == 1 and embedding.dtype == self.dtype and not self.published
        if not plain:
            return None
        if self.method == "eagle3":
            return Entry(embedding.data)
        norms = (self.pre_fc_norm_embedding, self.pre_fc_norm_hidden) if self.method == "mtp" else (None, None)
        weights = (None if norm is None else norm.weight.data for norm in norms)
        return Entry(embedding.data, self.fc.weight.data, *weights)

    def trained(self) -> dict[str, Tensor]:
        """The weights that are the head's own, by the names in its file."""
        prefix = MTP_PREFIX if self.method == "mtp" else ""
        weights = {name: w for name, w in self.state_dict().items() if not name.startswith("lm_head")}
        tensors = {prefix + name.removeprefix("model."): weight for name, weight in weights.items()}
        if self.ids is not None:
            tensors["d2t"] = to_offsets(self.ids.cpu())
        return tensors


def new_head(
    method: str,
    target: Transformer,
    *,
    ids: Tensor | None = None,
    inner: int | None = None,
    heads: int | None = None,
    seed: int = 0,
) -> FeatureHead:
    """A head to be trained, in float32. Its layer begins as the target's last where the sizes agree; what brings token
    and state together begins by handing the state on. `heads` of attention have each their own keys."""
    config = head_config(method, target.config, ids, inner, None if heads is None else (heads, heads))
    head = FeatureHead(method, config, target, ids)
    generator = torch.Generator().manual_seed(seed)
    theirs = dict(target.named_parameters())
    last = f"model.layers.{len(target.config.layers) - 1}."
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.startswith("lm_head"):
                continue
            source = theirs.get(name.replace("model.layers.0.", last))
            if source is not None and source.shape == weight.shape and target.config.norm_offset == 0:
                weight.copy_(source)
            elif "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
        if method == "eagle3":
            _begin_beside(head, theirs, last)
        else:
            _begin_fc(head)
        if method == "eagle":
            _begin_without_norm(head, generator)
    _give_head(head, target, torch.float32)
    return head.to(target.device)


def _begin_fc(head: FeatureHead) -> None:
    """The second half takes the state as it is."""
    hidden = head.config.hidden_size
    head.fc.weight[:, hidden:] += torch.eye(hidden)


def _begin_without_norm(head: FeatureHead, generator: torch.Generator) -> None:
    """Attention that no norm stands before begins as small noise: the target's is made for normed states, and of these
    some numbers are 50, so all of a query's weight would go to one key."""
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = head.get_parameter(f"model.layers.0.self_attn.{part}.weight")
        weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD / 2)


def _begin_beside(head: FeatureHead, theirs: Mapping[str, Tensor], last: str) -> None:
    """The half of attention's input that reads the state begins as the target's; the mean of the tapped layers is the
    first state."""
    hidden, taps = head.config.hidden_size, len(head.taps)
    head.fc.weight += torch.eye(hidden).repeat(1, taps) / taps
    for part in ("q_proj", "k_proj", "v_proj"):
        source = theirs.get(f"{last}self_attn.{part}.weight")
        weight = head.get_parameter(f"model.layers.0.self_attn.{part}.weight")
        if source is not None and source.shape == (weight.shape[0], hidden):
            weight[:, hidden:] = source.to(weight.device, weight.dtype)


def load_head(folder: HeadFolder, target: Transformer) -> FeatureHead:
    """The trained head, in the target's precision and on its device, ready to draft."""
    method = folder.method
    offsets = folder.tensors.get("d2t")
    ids = None if offsets is None else from_offsets(offsets, target.vocab_size)
    published = bool(folder.config.get(PUBLISHED))
    config = head_config(method, target.config, ids, *sizes(folder), published=published)
    listed = folder.config.get("eagle_aux_hidden_state_layer_ids")
    taps = None if listed is None else _taps(listed, len(target.config.layers), f"{folder.path}")
    with torch.device("meta"):
        head = FeatureHead(method, config, target, ids, taps, published)
    prefix = MTP_PREFIX if method == "mtp" else ""
    bare = replace(folder, tensors={name.removeprefix(prefix): tensor for name, tensor in folder.tensors.items()})
    weights: dict[str, Tensor] = {}
    for name, like in head.state_dict().items():
        if not name.startswith("lm_head"):
            weights[name] = bare.fitting(name.removeprefix("model."), like).to(target.device, target.dtype)
    own = bare.tensors.get("lm_head.weight")
    wanted = (config.vocab_size, config.hidden_size)
    if own is not None and own.shape != wanted:
        raise ValueError(f"{folder.path}: lm_head.weight has the shape {list(own.shape)}, not {list(wanted)}")
    rows = target.head_rows(ids) if own is None else own
    weights["lm_head.weight"] = rows.to(target.device, target.dtype)
    head.load_state_dict(weights, assign=True)
    if ids is not None:
        head.ids = ids.to(target.device)
    return head.requires_grad_(False).eval()


def sizes(folder: HeadFolder) -> tuple[int | None, tuple[int, int] | None]:
    """The width of its MLP and its numbers of heads, as config.json says; None where it says nothing."""
    inner, heads, kv_heads = (
        folder.config.get(name) for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    for name, size in (("intermediate_size", inner), ("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{folder.path}: config.json says {name} is {size!r}: train the drafter again")
    if heads is None:
        return inner, None
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(
            f"{folder.path}: config.json says that {kv_heads} heads of keys serve {heads} of queries, which cannot be "
            "shared out evenly: train the drafter again"
        )
    return inner, (heads, kv_heads)


def _taps(listed: object, layers: int, where: str) -> tuple[int, ...]:
    if not isinstance(listed, list) or not listed or not all(type(tap) is int and 0 <= tap <= layers for tap in listed):
        raise ValueError(f"{where} reads the layers {listed!r}, and the target has {layers}: train the drafter again")
    return tuple(listed)


def frozen_head(head: FeatureHead, target: Transformer) -> FeatureHead:
    """A copy to draft with, as the head is now, in the target's precision."""
    with torch.device("meta"):
        copy = FeatureHead(head.method, head.config, target, head.ids, head.taps, head.published)
    weights = {name: weight.detach().clone().to(target.dtype) for name, weight in head.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return copy.requires_grad_(False).eval()


def hf_config(head: FeatureHead, target: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as other engines read it, from the target's own."""
    config = head.config
    architectures = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3", "mtp": "ForerunMTP"}
    made = {key: value for key, value in target.items() if key not in ("torch_dtype", "forerun_enlarged")}
    made |= {
        "architectures": [architectures[head.method]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "draft_vocab_size": config.vocab_size,
    }
    if head.method == "eagle3":
        made["norm_before_residual"] = False
        if head.taps != default_taps(len_layers(target)):
            made["eagle_aux_hidden_state_layer_ids"] = list(head.taps)
    return made


def len_layers(hf: Mapping[str, Any]) -> int:
    return int(hf.get("num_hidden_layers", 0))


def _give_head(head: FeatureHead, target: Transformer, dtype: torch.dtype) -> None:
    """The target's output head, cut to the draft vocabulary; it is not trained."""
    rows = target.head_rows(head.ids).to(dtype)
    head.lm_head.weight = nn.Parameter(rows.clone(), requires_grad=False)
