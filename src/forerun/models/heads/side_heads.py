"""Heads that guess several tokens ahead from one state of the target: blockwise parallel decoding and Medusa.

Head k reads the state that the target's own output head reads, and guesses the token k + 1 places behind the one that
state gives. Each makes a state of its own and hands it to the target's output head, cut to the draft vocabulary:

    medusa      A_k (x + SiLU(W_k x + b_k)), one such block or several one behind the other   (Cai et al., 2024)
    blockwise   x + V_k ReLU(W x + b), a hidden layer that all heads share, V_k its own  (Stern et al., 2018)

Medusa gives every head an output matrix of its own. Here that is the target's, E, with a square matrix before it: E A_k
is as large as E, and A_k is what there is to store. Without it (A_k = 1; in folders that have none) a head can hardly
take anything away from x, since SiLU is never far below zero.

The token that x gave is known when drafts are made: the text ends with it. Medusa's heads see x alone. With a stem, our
addition, they all read in place of x

    x + V SiLU(W [e ; x] + b)

where e is the target's embedding of that token with a mean square of 1: embeddings may be many times smaller than x.
The heads still know nothing of each other's guesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.heads.files import HeadFolder
from forerun.models.heads.vocabulary import from_offsets, to_offsets
from forerun.models.native.rows import linear
from forerun.models.transformer import Transformer

METHODS = ("blockwise", "medusa")
SPREAD = 0.02
NO_SQUARE = 1e-12
"""Added to the mean square of an embedding, which may be zero."""


def _apply(layer: nn.Module, x: Tensor, plus: Tensor | None = None) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return linear(x, layer.weight, layer.bias, plus)


class MedusaBlock(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(_apply(layer, x))
        return x


class Stem(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * hidden, width)
        self.outer = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """[..., H] each."""
        sized = functional.rms_norm(embedding.float(), embedding.shape[-1:], eps=NO_SQUARE).to(x.dtype)
        return _apply(self.outer, functional.silu(_apply(self.inner, torch.cat([sized, x], -1))), x)


class SideHeads(nn.Module):
    def __init__(
        self,
        method: str,
        target: Transformer,
        count: int,
        ids: Tensor | None = None,
        inner: int | None = None,
        layers: int = 1,
        stem: int = 0,
    ) -> None:
        """`count` heads; `ids` is the draft vocabulary, `inner` the width of blockwise's hidden layer, the target's
        where None; for medusa 0 leaves the square matrices out. `layers` are the blocks of each of Medusa's heads,
        `stem` is the width of their stem; 0 for none."""
        super().__init__()
        assert method in METHODS
        assert method == "medusa" or not stem
        self.method, self.count, self.ids, self.inner, self.layers = method, count, ids, inner, layers
        self.layer = len(target.config.layers)
        """Whose states are read: behind the last layer, before the final norm."""
        hidden = target.config.hidden_size
        self.stem = Stem(hidden, stem) if stem else None
        if method == "medusa":
            self.blocks = nn.ModuleList(MedusaBlock(hidden, layers) for _ in range(count))
            width, squares = hidden, 0 if inner == 0 else count
        else:
            width, squares = inner or hidden, count
            self.hidden = nn.Linear(hidden, width)
        self.outputs = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(squares))
        self.lm_head = nn.Linear(hidden, target.vocab_size if ids is None else ids.shape[0], bias=False)
        self._target = [target]  # in a list, which hides it from PyTorch: it is not ours to train

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def vocabulary(self) -> int:
        """How many tokens can be drafted."""
        return self.lm_head.out_features

    @property
    def stem_width(self) -> int:
        return 0 if self.stem is None else self.stem.inner.out_features

    def states(self, x: Tensor, tokens: Tensor, count: int | None = None) -> Tensor:
        """x [..., H], what the target's own head reads, and the tokens [...] that it gave → [..., K, H] of the first
        `count` heads, or of all."""
        if self.stem is not None:
            with torch.no_grad():
                embedding = self._target[0].embed(tokens)
            x = self.stem(x, embedding)
        if self.method == "medusa":
            made = [block(x) for block in self.blocks[:count]]
            if self.outputs:
                made = [_apply(output, each) for output, each in zip(self.outputs[:count], made, strict=True)]
            return torch.stack(made, -2)
        shared = functional.relu(_apply(self.hidden, x))
        return torch.stack([_apply(output, shared, x) for output in self.outputs[:count]], -2)

    def forward(self, state: Tensor, tokens: Tensor, count: int | None = None) -> Tensor:
        """state [..., H] of the target behind its last layer, and the tokens [...] that come next → logits [..., K, Vd]
        of the first `count` heads, or of all."""
        normed: Tensor = self._target[0].model.norm(state)
        return _apply(self.lm_head, self.states(normed.to(self.dtype), tokens, count))

    def trained(self) -> dict[str, Tensor]:
        """The weights that are the heads' own, by the names in their file."""
        tensors = {name: w for name, w in self.state_dict().items() if not name.startswith("lm_head")}
        if self.ids is not None:
            tensors["d2t"] = to_offsets(self.ids.cpu())
        return tensors


def new_side_heads(
    method: str,
    target: Transformer,
    count: int,
    *,
    ids: Tensor | None = None,
    inner: int | None = None,
    layers: int = 1,
    stem: int = 0,
    seed: int = 0,
) -> SideHeads:
    """Heads to be trained, in float32. At first each says what the target's own head says."""
    heads = SideHeads(method, target, count, ids, inner, layers, stem)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if name in ("hidden.weight", "stem.inner.weight"):  # what reads it begins as zeros, so it must not
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
            elif method == "medusa" and name.startswith("outputs"):
                nn.init.eye_(weight)
            else:
                weight.zero_()
    heads.lm_head.weight = nn.Parameter(target.head_rows(ids).float().clone(), requires_grad=False)
    return heads.to(target.device)


def load_side_heads(folder: HeadFolder, target: Transformer) -> SideHeads:
    """The trained heads, in the target's precision and on its device."""
    offsets = folder.tensors.get("d2t")
    ids = None if offsets is None else from_offsets(offsets, target.vocab_size)
    count = folder.config.get("num_heads")
    if type(count) is not int or not 1 <= count <= 64:
        raise ValueError(f"{folder.path}: config.json says num_heads is {count!r}: train the drafter again")
    layers, stem = 1, 0
    if folder.method == "medusa":
        layers = max(1, sum(name.startswith("blocks.0.") and name.endswith(".weight") for name in folder.tensors))
        inner = None if "outputs.0.weight" in folder.tensors else 0
        if "stem.inner.weight" in folder.tensors:
            stem = len(folder.tensors["stem.inner.weight"])
    else:
        units = folder.tensors.get("hidden.bias")
        inner = None if units is None else len(units)
    with torch.device("meta"):
        heads = SideHeads(folder.method, target, count, ids, inner, layers, stem)
    weights: dict[str, Tensor] = {"lm_head.weight": target.head_rows(ids)}
    for name, like in heads.state_dict().items():
        if name in weights:
            continue
        weights[name] = folder.fitting(name, like)
    heads.load_state_dict({name: w.to(target.device, target.dtype) for name, w in weights.items()}, assign=True)
    if ids is not None:
        heads.ids = ids.to(target.device)
    return heads.requires_grad_(False).eval()


def frozen_side_heads(heads: SideHeads, target: Transformer) -> SideHeads:
    """A copy to draft with, as the heads are now, in the target's precision."""
    with torch.device("meta"):
        copy = SideHeads(heads.method, target, heads.count, heads.ids, heads.inner, heads.layers, heads.stem_width)
    weights = {name: weight.detach().clone().to(target.dtype) for name, weight in heads.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return copy.requires_grad_(False).eval()


def side_config(heads: SideHeads, target: Mapping[str, Any]) -> dict[str, Any]:
    """config.json; Medusa's as vLLM reads it, which knows no stem."""
    if heads.stem is not None:
        architecture = "ForerunMedusaStem"
    else:
        architecture = "MedusaModel" if heads.method == "medusa" else "ForerunBlockwise"
    return {
        "architectures": [architecture],
        "model_type": heads.method,
        "hidden_size": target.get("hidden_size"),
        "vocab_size": target.get("vocab_size"),
        "truncated_vocab_size": heads.vocabulary,
        "num_heads": heads.count,
        "num_hidden_layers": heads.layers,
        "medusa_fc_bias": True,
        "dtype": "bfloat16",
        **({} if heads.stem is None else {"stem": heads.stem_width}),
    }
