"""A drafter for an enlarged model, from one that was trained for the small model: it drafts the same, at the cost of a
drafter of the larger shape.

What it reads of the large target are the small one's states and embeddings with zeros behind them, and so is all that
it makes itself: its matrices are placed and its norms scaled as the target's are (`models/enlarge.py`). Layers were
added behind the last one, so the layers that are read keep their numbers. The output head is the large target's own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.enlarge import STEP, Places, enlarged_config, scales_between
from forerun.models.heads import feature_head, side_heads
from forerun.models.heads.feature_head import PUBLISHED, FeatureHead, default_taps, head_config, sizes
from forerun.models.heads.files import HeadFolder
from forerun.models.heads.vocabulary import from_offsets
from forerun.models.identity import BESIDE_THE_WEIGHTS, weights_identity
from forerun.models.transformer import Transformer
from forerun.models.widen import Axis, Noise, widen_matrix, widen_vector

METHODS = (*feature_head.METHODS, *side_heads.METHODS, "parallel")
TAPS = "eagle_aux_hidden_state_layer_ids"
NOT_NUMBERS = frozenset({"d2t", "t2d"})
"""Which tokens are drafted; the vocabulary stays."""


def enlarge_head(
    folder: HeadFolder, small: ModelConfig, large: Transformer, *, name: str = "", seed: int = 0
) -> HeadFolder:
    """The drafter in `folder`, which is for a target of the config `small`, for that target enlarged to `large`; of
    `large` only its config and what it is told by are looked at. `name` is how the manifest calls it."""
    check_method(folder.method)
    _check_targets(small, large.config)
    noise = Noise(seed, large.dtype, "cpu")
    if folder.method in feature_head.METHODS:
        tensors, config = _feature_head(folder, small, large.config, noise)
    else:
        tensors = _side_tensors(folder, small.hidden_size, large.config.hidden_size, noise)
        config = folder.config | {"hidden_size": large.config.hidden_size}
        if "stem.inner.weight" in tensors:
            config["stem"] = len(tensors["stem.inner.weight"])
    return HeadFolder(folder.method, config, tensors, _manifest(folder, large, name, seed))


def _another(folder: HeadFolder, name: str) -> str:
    where = folder.path or "the drafter"
    return f"{where}: {name} does not fit the small model: name a drafter that was trained for it"


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(
            f"{method} is not made for the width of one target, so there is nothing to enlarge: use it with the "
            "enlarged model as it is"
        )


def _check_targets(small: ModelConfig, large: ModelConfig) -> None:
    kept = {field: getattr(large, field) for field in BESIDE_THE_WEIGHTS}
    wide = replace(enlarged_config(small, large), layers=large.layers, **kept)
    if wide != large or large.layers[: len(small.layers)] != small.layers:
        raise ValueError("the large model is not the small one enlarged: make it with `forerun models enlarge`")


def _manifest(folder: HeadFolder, large: Transformer, name: str, seed: int) -> dict[str, Any]:
    """As it was, for the other target. How often drafts are right stays true; which tree is fastest does not."""
    before = folder.manifest.get("target")
    about = dict(before) if isinstance(before, dict) else {}
    made = folder.manifest | {
        "target": about | {"name": name, "identity": weights_identity(large)},
        "enlarged": {"drafter": folder.path.name if folder.path else "", "target": about, "seed": seed},
    }
    if isinstance(made.get("calibration"), dict):
        made["calibration"] = {key: value for key, value in made["calibration"].items() if key != "trees"}
    return made


# --- heads that guess from one state, and look-ahead embeddings ------------------------------------------------


def _side_tensors(folder: HeadFolder, narrow: int, wide: int, noise: Noise) -> dict[str, Tensor]:
    stream = Axis.first(narrow, wide)
    bias = folder.tensors.get("hidden.bias", folder.tensors.get("stem.inner.bias"))
    units = stream if bias is None or len(bias) == narrow else Axis.first(len(bias), len(bias) * wide // narrow)
    numbers = {name: tensor for name, tensor in folder.tensors.items() if name not in NOT_NUMBERS}
    made = {name: _beside(folder, name, tensor, stream, units, noise) for name, tensor in numbers.items()}
    return folder.tensors | made


def _beside(folder: HeadFolder, name: str, tensor: Tensor, stream: Axis, units: Axis, noise: Noise) -> Tensor:
    """A tensor of Medusa's, of blockwise decoding's or of PaSS's."""
    match name.split("."):
        case ["blocks", _, "layers", _, "weight"]:  # adds to the stream
            sides = stream.closed(), stream
        case ["hidden", "weight"]:  # units that the outputs read
            sides = units, stream
        case ["stem", "inner", "weight"]:  # of the embedding and the state, as EAGLE's `fc`
            sides = units, stream.repeated(2)
            _check_sides(folder, name, tensor, *sides)
            tensor = _smaller_embedding(tensor, stream)
        case ["stem", "outer", "weight"]:
            sides = stream.closed(), units.closed()
        case ["outputs", _, "weight"]:
            sides = stream.closed(), (stream if folder.method == "medusa" else units).closed()
        case ["look_ahead", "weight"]:
            rows = tensor.shape[0]
            sides = Axis.first(rows, rows), stream.closed()
        case ["blocks", _, "layers", _, "bias"] | ["hidden", "bias"] | ["stem", "inner", "bias"]:
            _check_sides(folder, name, tensor, axis := stream if name.startswith("blocks") else units)
            return widen_vector(tensor, axis, noise)
        case _:
            raise ValueError(f"the drafter has a tensor {name}, which cannot be enlarged: train it again")
    _check_sides(folder, name, tensor, *sides)
    return widen_matrix(tensor, *sides, noise)


def _smaller_embedding(tensor: Tensor, stream: Axis) -> Tensor:
    """The stem brings an embedding to a mean square of 1, over more numbers of which many are zero. The others become
    larger by that, and their columns smaller."""
    narrow = int(stream.taken.sum())
    columns = torch.ones(2 * narrow)
    columns[:narrow] = math.sqrt(narrow / stream.size)
    return tensor.float() * columns


def _check_sides(folder: HeadFolder, name: str, tensor: Tensor, *sides: Axis) -> None:
    if tensor.shape != tuple(int(side.taken.sum()) for side in sides):
        raise ValueError(_another(folder, name))


# --- heads that go on from state to state ----------------------------------------------------------------------


def _feature_head(
    folder: HeadFolder, small: ModelConfig, large: ModelConfig, noise: Noise
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    method, config = folder.method, dict(folder.config)
    offsets, published = folder.tensors.get("d2t"), bool(config.get(PUBLISHED))
    ids = None if offsets is None else from_offsets(offsets, small.vocab_size)
    inner, heads = sizes(folder)
    inner = inner or small.intermediate_size
    narrow = head_config(method, small, ids, inner, heads, published=published)
    wide = head_config(method, large, ids, _inner(inner, large), _heads(heads, small, large), published=published)
    taps = tuple(config.pop(TAPS, ())) or (default_taps(len(small.layers)) if method == "eagle3" else None)
    with torch.device("meta"):
        head = FeatureHead(method, narrow, Transformer(small), ids, taps, published)
    wanted = {name: tensor.shape for name, tensor in head.trained().items()}
    if "lm_head.weight" in folder.tensors:
        wanted["lm_head.weight"] = head.lm_head.weight.shape
    places, scales = Places.between(narrow, wide), scales_between(narrow, wide)
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name in NOT_NUMBERS}
    for name in sorted(wanted.keys() - NOT_NUMBERS):
        tensor = folder.tensors.get(name)
        if tensor is None or tensor.shape != wanted[name]:
            raise ValueError(_another(folder, name))
        tensors[name] = _placed(name, tensor, places, scales, noise)
    if taps is not None and taps != default_taps(len(large.layers)):
        config[TAPS] = list(taps)
    config |= {
        "hidden_size": wide.hidden_size,
        "intermediate_size": wide.intermediate_size,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": wide.head_dim,
        "rms_norm_eps": wide.norm_eps,
    }
    return tensors, config


def _inner(inner: int, large: ModelConfig) -> int:
    """As wide as the large target's, as published heads are; wider only where the small head's would not fit."""
    return large.intermediate_size if inner <= large.intermediate_size else -(-inner // STEP) * STEP


def _heads(heads: tuple[int, int] | None, small: ModelConfig, large: ModelConfig) -> tuple[int, int] | None:
    """As many as the large target has, with as many heads of keys as the small head's need; more only where these would
    not fit."""
    if heads is None or heads == (small.heads, small.kv_heads):
        return None
    keys = max(heads[1], large.kv_heads)
    return -(-max(heads[0], large.heads) // keys) * keys, keys


def _placed(name: str, tensor: Tensor, places: Places, scales: dict[str, float], noise: Noise) -> Tensor:
    module, kind = name.split(".")[-2:]
    if module in ("q_norm", "k_norm"):
        return widen_vector(tensor, places.dims, noise, scales[module], spare=scales[module])
    scale = scales["norm"] if "norm" in module else scales.get(module, 1.0)
    if "norm" in module:
        return widen_vector(tensor, places.stream, noise, scale, spare=scale)
    rows, columns = (places.stream.closed(), places.stream) if module == "fc" else places.sides(module)
    if kind == "bias":
        return widen_vector(tensor, rows, noise, scale)
    vectors = tensor.shape[1] // int(columns.taken.sum())  # read one behind another: embedding and state, or states
    return widen_matrix(tensor, rows, columns.repeated(vectors), noise, scale)
