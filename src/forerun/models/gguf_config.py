"""What a GGUF file says about its model, in the words of a Hugging Face `config.json`, and where its tensors go.

The converted folder is read like any other, so that this is the only place where the two worlds meet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.models.fields import Fields
from forerun.models.gguf_file import GGUFFile
from forerun.models.hf_config import MOST_LAYERS
from forerun.models.names import Place

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "smollm3")
PERMUTED = ("llama", "smollm3")
"""Their queries and keys are stored for rotary positions that turn neighbouring numbers, ours turn halves."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_GEMMA_27B_LAYERS = 62
"""Gemma-3 27B alone scales q·k by hidden size over heads; GGUF has no key for it, so llama.cpp goes by the layers."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} is of the architecture {architecture!r}, and Forerun reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}: take the model as a Hugging Face folder"
        )
    if (parts := meta.get("split.count", 1)) not in (0, 1):
        raise ValueError(f"{file.path} is one of {parts} parts: join them with llama-gguf-split, and name the result")
    prefix = f"{architecture}."
    fields = Fields(
        {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}, {}, str(file.path)
    )
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    size = fields.maybe_integer("attention.key_length") or hidden // heads
    _check_heads(fields, size)
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: the tensor token_embd.weight is missing: fetch the file again")
    tokens = Fields(meta, {}, str(file.path))
    config: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.maybe_integer("attention.head_count_kv") or heads,
        "head_dim": size,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokens.maybe_integer("tokenizer.ggml.bos_token_id", least=0),
        "eos_token_id": tokens.maybe_integer("tokenizer.ggml.eos_token_id", least=0),
        "pad_token_id": tokens.maybe_integer("tokenizer.ggml.padding_token_id", least=0),
    }
    theta = fields.number("rope.freq_base") if fields.raw("rope.freq_base") is not None else 10_000.0
    rope = _rope(file, fields, theta, size)
    family = _family(architecture, fields, config, file, rope)
    return {"model_type": family, "architectures": [_CLASSES[family]], **config}


def _check_heads(fields: Fields, size: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if (fields.maybe_integer(key) or size) != size:
            raise ValueError(f"{fields.where}: {key} differs from the size of a head, {size}: take another model")


def _family(architecture: str, fields: Fields, config: dict[str, Any], file: GGUFFile, rope: dict[str, Any]) -> str:
    """The Hugging Face family, and what `config` needs besides."""
    experts = fields.maybe_integer("expert_count", least=0) or 0
    moe = architecture == "qwen3moe"
    if not moe:
        config["intermediate_size"] = fields.integer("feed_forward_length")
    else:
        config["intermediate_size"] = fields.maybe_integer("feed_forward_length") or fields.integer(
            "expert_feed_forward_length"
        )
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": fields.integer("expert_used_count")}
    config["rope_parameters"] = rope
    bias = "blk.0.attn_q.bias" in file.tensors
    match architecture:
        case "qwen2":
            return "qwen2"
        case "qwen3moe":
            config |= {"moe_intermediate_size": fields.integer("expert_feed_forward_length"), "norm_topk_prob": True}
            return "qwen3_moe"
        case "gemma3":
            _gemma(fields, config, rope)
            return "gemma3_text"
        case "smollm3":
            config["attention_bias"] = bias
            return "smollm3"
        case "qwen3":
            config["attention_bias"] = bias
            return "qwen3"
    if experts:
        config["sliding_window"] = fields.maybe_integer("attention.sliding_window")
        return "mixtral"
    if (window := fields.maybe_integer("attention.sliding_window", least=0)) is not None and window > 0:
        config["sliding_window"] = window
        return "mistral"
    config["attention_bias"] = bias
    return "llama"


def _gemma(fields: Fields, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """What the format leaves out is as llama.cpp has it: every sixth layer is global, the others turn with 10,000."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    large = layers == _GEMMA_27B_LAYERS
    local = fields.number("rope.freq_base_swa") if fields.raw("rope.freq_base_swa") is not None else 10_000.0
    window = fields.integer("attention.sliding_window")
    pattern = fields.raw("attention.sliding_window_pattern")
    step = pattern if isinstance(pattern, int) and pattern > 0 else 6
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // heads if large else config["head_dim"],
        "sliding_window": window,
        "layer_types": [
            "full_attention" if (index + 1) % step == 0 else "sliding_attention" for index in range(layers)
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": fields.raw("final_logit_softcapping"),
        "attn_logit_softcapping": fields.raw("attn_logit_softcapping"),
    }


# --- positions ------------------------------------------------------------------------------------------------


def _rope(file: GGUFFile, fields: Fields, theta: float, size: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if "rope_freqs.weight" in file.tensors:
        factors = torch.cat([numbers for _, numbers in file.read("rope_freqs.weight")]).double().numpy()
        return {**rope, **llama3_factors(factors, theta, size, str(file.path))}
    kind = fields.raw("rope.scaling.type")
    if kind in (None, "none"):
        return rope
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length")
        extra = {"factor": factor, "original_max_position_embeddings": original}
        return {**rope, "rope_type": "yarn", **extra}
    raise ValueError(f"{file.path} scales its positions by {kind!r}: take a model with linear, llama3 or yarn scaling")


def llama3_factors(
    factors: np.ndarray[Any, np.dtype[np.float64]], theta: float, size: int, where: str
) -> dict[str, Any]:
    """The parameters behind the factors by which Llama-3 stretches each wavelength, which is all that a file keeps.

    Between the two bounds 1/factor is linear in 1/wavelength. Only original context over low, and over high, enter it:
    with low = 1 a line through two points gives both, and the whole list must come out again.
    """
    refusal = ValueError(f"{where}: rope_freqs.weight are not the factors of Llama-3's scaling: take another model")
    if factors.shape != (size // 2,):
        raise refusal
    wavelength = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    largest = float(factors.max())
    if np.allclose(factors, 1.0):
        return {}
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)  # 1 where nothing is stretched
    between = np.flatnonzero((share > 1e-4) & (share < 1 - 1e-4))
    candidates = [(8192, 4.0)]  # Llama 3.1 and 3.2
    if len(between) >= 2:
        slope, offset = np.polyfit(1 / wavelength[between], share[between], 1)
        if offset < 0:
            high = 1 - 1 / offset
            candidates.append((round(slope * (high - 1)), round(float(high), 3)))
    for original, high in candidates:
        smooth = np.clip((original / wavelength - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": float(str(np.float32(largest))),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise refusal


# --- tensors --------------------------------------------------------------------------------------------------

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+?)(?:_exps|\.(\d+))?\.(weight|bias)")


@dataclass(frozen=True)
class Target:
    """Where a tensor of the file goes, and what is done to it on the way."""

    place: Place
    heads: int | None = None
    """Queries or keys whose rows are put in our order; of so many heads."""
    subtract: float = 0.0


def targets(file: GGUFFile, config: dict[str, Any]) -> dict[str, Target]:
    """Of every tensor that the model has; `config` is what `hf_config` gave. Names that are not known are kept, so that
    the comparison with what the model should have names them."""
    architecture = file.metadata["general.architecture"]
    gemma = architecture == "gemma3"
    inside = {**_INSIDE, **_SANDWICH} if gemma else _INSIDE
    found: dict[str, Target] = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        goal = _place(name, inside)
        heads = None
        if architecture in PERMUTED and goal.name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in goal.name else "num_key_value_heads"]
        found[name] = Target(goal, heads, 1.0 if gemma and goal.name.endswith("norm.weight") else 0.0)
    return found


def _place(name: str, inside: dict[str, str]) -> Place:
    if name in _OUTSIDE:
        return Place(_OUTSIDE[name])
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in inside:
        return Place(name)
    layer, kind, expert, end = f"model.layers.{match[1]}", match[2], match[3], match[4]
    stacked = name.endswith(f"_exps.{end}")
    if not stacked and expert is None:
        return Place(f"{layer}.{inside[kind]}.{end}")
    number = None if expert is None else int(expert)
    match kind:
        case "ffn_gate":
            return Place(f"{layer}.mlp.experts.gate_up_proj", number, 0)
        case "ffn_up":
            return Place(f"{layer}.mlp.experts.gate_up_proj", number, 1)
        case "ffn_down":
            return Place(f"{layer}.mlp.experts.down_proj", number)
    return Place(name)


def read_target(file: GGUFFile, name: str, target: Target, out: Tensor) -> None:
    """Dequantise a tensor into `out`, the part of ours that it fills."""
    tensor = file.tensors[name]
    whole = out if out.is_contiguous() else torch.empty(tensor.shape, dtype=out.dtype)
    flat = whole.view(-1)
    for first, numbers in file.read(name):
        flat[first : first + numbers.shape[0]] = numbers - target.subtract if target.subtract else numbers
    if target.heads is not None:  # rows [heads, size/2, 2] → [heads, 2, size/2]
        half = tensor.shape[0] // (2 * target.heads)
        whole = whole.view(target.heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if whole is not out:
        out.copy_(whole)
