"""A draft model that reads and speaks with its target's own matrices: a few layers, and a norm.

Of a small model the embedding and the output head are most of the weights. Shared with the target they need not be
stored or loaded twice, and the head is cut to the draft vocabulary, which makes a draft several times as quick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.config import ModelConfig
from forerun.models.heads.files import HeadFolder
from forerun.models.heads.vocabulary import from_offsets, to_offsets
from forerun.models.transformer import Transformer

ARCHITECTURE = "ForerunSharedDraft"


def spread(count: int, of: int) -> list[int]:
    """Which layers of the target the draft's begin as: from its first to its last."""
    return [round(index * (of - 1) / max(1, count - 1)) for index in range(count)]


def shared_config(target: ModelConfig, layers: int, ids: Tensor | None) -> ModelConfig:
    chosen = tuple(replace(target.layers[index], experts=False) for index in spread(layers, len(target.layers)))
    return replace(
        target,
        vocab_size=target.vocab_size if ids is None else ids.shape[0],
        layers=chosen,
        tied=False,
        embedding_scale=1.0,  # the target's own embedding has it
        experts=0,
    )


class SharedDraft(Transformer):
    def __init__(self, config: ModelConfig, target: Transformer, ids: Tensor | None) -> None:
        super().__init__(config)
        del self.model.embed_tokens  # the target's is used, and is no part of this
        self.embed = target.embed  # type: ignore[method-assign]
        self.ids, self.reads = ids, target.vocab_size

    def trained(self) -> dict[str, Tensor]:
        """The weights that are its own, by the names in its file."""
        weights = {name: w for name, w in self.state_dict().items() if not name.startswith("lm_head")}
        tensors = {name.removeprefix("model."): weight for name, weight in weights.items()}
        if self.ids is not None:
            tensors["d2t"] = to_offsets(self.ids.cpu())
        return tensors


def new_shared_draft(target: Transformer, layers: int, *, ids: Tensor | None = None) -> SharedDraft:
    """A draft to be trained, in float32: its layers are some of the target's."""
    if not 1 <= layers <= len(target.config.layers):
        raise ValueError(f"--layers is {layers}: the target has {len(target.config.layers)}, so give 1 to that many")
    if any(layer.experts for layer in target.config.layers):
        raise ValueError("the target has experts, whose layers a draft cannot begin as: add --own-matrices")
    draft = SharedDraft(shared_config(target.config, layers, ids), target, ids)
    theirs = dict(target.named_parameters())
    chosen = spread(layers, len(target.config.layers))
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"]:
                parts[2] = str(chosen[int(parts[2])])
            if not name.startswith("lm_head"):
                weight.copy_(theirs[".".join(parts)])
    draft.lm_head.weight = nn.Parameter(target.head_rows(ids).float().clone(), requires_grad=False)
    return draft.to(target.device)


def load_shared_draft(folder: HeadFolder, target: Transformer) -> SharedDraft:
    """In the target's precision and on its device, ready to draft."""
    offsets = folder.tensors.get("d2t")
    ids = None if offsets is None else from_offsets(offsets, target.vocab_size)
    layers = folder.config.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= len(target.config.layers):
        raise ValueError(f"{folder.path}: config.json says num_hidden_layers is {layers!r}: train the draft again")
    with torch.device("meta"):
        draft = SharedDraft(shared_config(target.config, layers, ids), target, ids)
    weights: dict[str, Tensor] = {"lm_head.weight": target.head_rows(ids)}
    for name, like in draft.state_dict().items():
        if name in weights:
            continue
        weights[name] = folder.fitting(name.removeprefix("model."), like)
    return _ready(draft, weights, target)


def frozen_shared_draft(draft: SharedDraft, target: Transformer) -> SharedDraft:
    """A copy to draft with, as it is now."""
    with torch.device("meta"):
        copy = SharedDraft(draft.config, target, draft.ids)
    return _ready(copy, {name: weight.detach().clone() for name, weight in draft.state_dict().items()}, target)


def _ready(draft: SharedDraft, weights: Mapping[str, Tensor], target: Transformer) -> SharedDraft:
    draft.load_state_dict({name: w.to(target.device, target.dtype) for name, w in weights.items()}, assign=True)
    if draft.ids is not None:
        draft.ids = draft.ids.to(target.device)
    return draft.requires_grad_(False).eval()


def shared_hf_config(draft: SharedDraft, target: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in target.items() if key not in ("torch_dtype", "forerun_enlarged")}
    return made | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": len(draft.config.layers),
        "draft_vocab_size": draft.config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def draft_identity(draft: SharedDraft) -> str:
    """What tells it from other drafts for the same target, before it is laid out for speed."""
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.trained().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def is_shared_draft(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == [ARCHITECTURE]
