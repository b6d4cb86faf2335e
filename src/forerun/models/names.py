"""The names and shapes of a model's tensors, and where each tensor of a checkpoint goes.

Our transformer uses Hugging Face's names. The experts of a layer are one stacked tensor; checkpoints store them one
by one, under names that differ by family, so that a stored tensor is a `Place`: a part of one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from forerun.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a stored tensor goes: all of `name`, or the rows of one expert, of which gate and up are halves."""

    name: str
    expert: int | None = None
    half: int | None = None
    """0 for the gate, 1 for up; None for all rows."""

    def part(self, whole: Tensor) -> Tensor:
        """The view of our tensor that the stored one fills."""
        if self.expert is not None:
            whole = whole[self.expert]
        if self.half is None:
            return whole
        rows = whole.shape[-2] // 2
        return whole.narrow(-2, self.half * rows, rows)

    def shape(self, whole: Shape) -> Shape | None:
        """Of the stored tensor, where ours has the shape `whole`; None for an expert that is not there."""
        if self.expert is not None:
            if self.expert >= whole[0]:
                return None
            whole = whole[1:]
        return whole if self.half is None else (*whole[:-2], whole[-2] // 2, whole[-1])


_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.")
_PICTURES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_AHEAD = ("mtp.", "model.mtp_layers.")  # modules that foresee tokens (heads/checkpoint_mtp.py)
_BARE = ("layers.", "embed_tokens.", "norm.")  # a checkpoint of the transformer without its head
_EXPERT = re.compile(
    r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_HALF = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def place(stored: str) -> Place | None:
    """Where a tensor of a Hugging Face checkpoint goes; None for one that no text model needs."""
    if stored.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")):
        return None
    if stored.startswith((*_PICTURES, *_AHEAD)):
        return None
    name = stored
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            name = name.removeprefix(wrapper)
            break
    if name.startswith(_BARE):
        name = f"model.{name}"
    if match := _EXPERT.fullmatch(name):
        layer, expert, kind = match[1], int(match[2]), match[3]
        if kind in _HALF:
            return Place(f"{layer}.mlp.experts.gate_up_proj", expert, _HALF[kind])
        return Place(f"{layer}.mlp.experts.down_proj", expert)
    return Place(name.replace(".block_sparse_moe.gate.", ".mlp.gate."))


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of our transformer, in the order of the model."""
    hidden, size = config.hidden_size, config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        at = f"model.layers.{index}"
        for which, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            shapes[f"{at}.self_attn.{which}_proj.weight"] = (heads * size, hidden)
            if config.qkv_bias:
                shapes[f"{at}.self_attn.{which}_proj.bias"] = (heads * size,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, config.heads * size)
        if config.output_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (size,)
        shapes |= _experts(at, config) if layer.experts else _mlp(at, config)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in norms}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mlp(at: str, config: ModelConfig) -> dict[str, Shape]:
    inner, hidden = config.intermediate_size, config.hidden_size
    shapes: dict[str, Shape] = {}
    for which, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        shapes[f"{at}.mlp.{which}_proj.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"{at}.mlp.{which}_proj.bias"] = (rows,)
    return shapes


def _experts(at: str, config: ModelConfig) -> dict[str, Shape]:
    experts, inner, hidden = config.experts, config.expert_size, config.hidden_size
    return {
        f"{at}.mlp.gate.weight": (experts, hidden),
        f"{at}.mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{at}.mlp.experts.down_proj": (experts, hidden, inner),
    }


def plan(
    stored: Mapping[str, Shape],
    config: ModelConfig,
    where: str,
    goes: Callable[[str], Place | None] = place,
) -> dict[str, Place]:
    """Where each stored tensor goes, once everything is known to fit.

    Refuses a tensor too few, too many, twice or of another shape, and names the first.
    """
    expected = expected_shapes(config)
    filled: dict[tuple[str, int | None, int | None], str] = {}
    chosen: dict[str, Place] = {}
    for name, shape in stored.items():
        goal = goes(name)
        if goal is None or (goal.name == "lm_head.weight" and config.tied):
            continue
        if goal.name not in expected:
            raise ValueError(f"{where}: the tensor {name} has no place in a {config.family} model: {_FIX}")
        wanted = goal.shape(expected[goal.name])
        if wanted is None:
            raise ValueError(f"{where}: {name} is of an expert beyond the {config.experts} of config.json: {_FIX}")
        if tuple(shape) != wanted:
            raise ValueError(f"{where}: {name} has the shape {_show(shape)}, not {_show(wanted)}: {_FIX}")
        key = (goal.name, goal.expert, goal.half)
        if key in filled:
            raise ValueError(f"{where}: {name} and {filled[key]} are the same tensor: keep one of them")
        filled[key] = name
        chosen[name] = goal
    parts: dict[str, int] = {}
    for whole, expert, half in filled:
        parts[whole] = parts.get(whole, 0) + _weight(config, whole, expert, half)
    for name in expected:
        if parts.get(name, 0) != _weight(config, name, None, None):
            raise ValueError(f"{where}: {_missing(name, filled, config)} is missing: {_FIX}")
    return chosen


_FIX = "fetch the model again, or name the folder of another one"


def _weight(config: ModelConfig, name: str, expert: int | None, half: int | None) -> int:
    """In units of which a whole tensor has 2 per expert."""
    units = 2 if half is None else 1
    stacked = ".mlp.experts." in name
    return units * config.experts if stacked and expert is None else units


def _missing(name: str, filled: Mapping[tuple[str, int | None, int | None], str], config: ModelConfig) -> str:
    """The tensor, or the expert of it, that nothing fills."""
    present = {(expert, half) for whole, expert, half in filled if whole == name}
    if not present or ".mlp.experts." not in name:
        return f"the tensor {name}"
    for expert in range(config.experts):
        if (expert, None) in present or {(expert, 0), (expert, 1)} <= present:
            continue
        return f"expert {expert} of {name}"
    return f"the tensor {name}"


def _show(shape: Shape) -> str:
    return " × ".join(map(str, shape)) or "a single number"
