"""The module for multi-token prediction that some models are published with, as a part of their own checkpoint.

    Qwen   mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm, layers.0.*}
    MiMo   model.mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm, …}

Both are the head `mtp`, with a layer like the target's own, and hand on what the output head reads. MiMo's projection
takes the state before the embedding, the other one takes it behind. A module foresees the token after the next one; of
several, each made for one token further ahead, only the first is used, again and again on what it made itself, as is
done with models that have no more than one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.checkpoint import read_tensor, stored_tensors
from forerun.models.config import ModelConfig
from forerun.models.heads.feature_head import MTP_PREFIX, PUBLISHED, head_config
from forerun.models.heads.files import HeadFolder
from forerun.models.names import Shape, expected_shapes

_MIMO = "model.mtp_layers.0."
_NAMES = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}
_LATER = re.compile(r"layers\.[1-9]")
_FIX = "choose another drafter, or train one with `forerun train mtp`"


def read_mtp(folder: Path, target: ModelConfig) -> HeadFolder | None:
    """The module in a model's folder, as a head; None where it has none. One that the head cannot be is refused."""
    stored = stored_tensors(folder)
    found = {ours: stored[name] for name in stored if (ours := _our_name(name)) is not None}
    if not found:
        return None
    if any(".experts." in name or ".shared_expert" in name for name in found):
        raise ValueError(
            f"{folder}: its module for multi-token prediction has experts, and Forerun's have none: {_FIX}"
        )
    gate = found.get("layers.0.mlp.gate_proj.weight")
    inner = target.intermediate_size if gate is None else gate.shape[0]
    _check({name: each.shape for name, each in found.items()}, target, inner, folder)
    tensors = {name: read_tensor(each) for name, each in found.items()}
    if any(name.startswith(_MIMO) for name in stored):
        tensors["fc.weight"] = _swapped(tensors["fc.weight"])
    config = {"architectures": ["ForerunMTP"], "intermediate_size": inner, PUBLISHED: True}
    return HeadFolder("mtp", config, {MTP_PREFIX + name: tensor for name, tensor in tensors.items()}, {}, folder)


def _our_name(stored: str) -> str | None:
    """In a head's file, without its prefix; None for what is no part of a first module."""
    if stored.endswith("rotary_emb.inv_freq"):
        return None
    if stored.startswith(MTP_PREFIX):
        name = stored.removeprefix(MTP_PREFIX)
        return None if _LATER.match(name) else name
    if not stored.startswith(_MIMO):
        return None
    part, _, kind = stored.removeprefix(_MIMO).rpartition(".")
    return f"{_NAMES[part]}.{kind}" if part in _NAMES else f"layers.0.{part}.{kind}"


def _check(found: Mapping[str, Shape], target: ModelConfig, inner: int, folder: Path) -> None:
    """That nothing is missing, and nothing there that would not be computed."""
    hidden = target.hidden_size
    wanted = {
        name.removeprefix("model."): shape
        for name, shape in expected_shapes(head_config("mtp", target, None, inner, published=True)).items()
        if not name.startswith(("model.embed_tokens", "lm_head"))
    }
    wanted |= {"pre_fc_norm_embedding.weight": (hidden,), "pre_fc_norm_hidden.weight": (hidden,)}
    wanted["fc.weight"] = (hidden, 2 * hidden)
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            own, ours = (list(each[name]) if name in each else "nothing" for each in (found, wanted))
            raise ValueError(
                f"{folder}: its module for multi-token prediction has {own} for {name}, and Forerun's for a "
                f"{target.family} model has {ours}: {_FIX}"
            )


def _swapped(fc: Tensor) -> Tensor:
    """[H, 2H] for [state; embedding] → for [embedding; state]."""
    state, embedding = fc.chunk(2, 1)
    return torch.cat([embedding, state], 1)
