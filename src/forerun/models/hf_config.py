"""From a Hugging Face `config.json` to a `ModelConfig`.

Where a key is absent, the family's default in `transformers` applies; a test compares the two. What would change the
result and is not understood is refused: a model that runs and is slightly wrong is worse than one that does not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forerun.models.config import Activation, Layer, ModelConfig
from forerun.models.fields import Fields
from forerun.models.hf_rope import ropes_from_hf

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2": _QWEN2,
    "mimo": _QWEN2,  # the same layers; what it has besides is a drafter
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "smollm3": {
        **_LLAMA,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_LLAMA,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
}
"""What `transformers` takes for keys that a config of the family leaves out."""

THETA = {"mixtral": 1_000_000.0, "smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0}
"""The base of the positions where nothing is said; 10,000 for the other families."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None, 0, 0.0),
    "attn_logit_softcapping": (None, 0, 0.0),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
"""Keys that change what a model computes, and the values with which they do not."""

MOST_LAYERS = 10_000
"""Of a config that is meant; a damaged one may ask for more than the memory can list."""

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_OTHER = "take another model"


def is_ours(hf: Mapping[str, Any]) -> bool:
    """Whether our own transformer runs this model; the adapter around `transformers` takes the others."""
    family = hf.get("model_type")
    return isinstance(family, str) and (family in DEFAULTS or family == "gemma3")


def config_from_hf(
    hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """`generation` is `generation_config.json`, which has the last word on where a text ends."""
    if not is_ours(hf):
        known = ", ".join(sorted([*DEFAULTS, "gemma3"]))
        raise ValueError(
            f"{where} is of the family {hf.get('model_type')!r}, and Forerun runs {known}: take one of these"
        )
    family, values = str(hf["model_type"]), dict(hf)
    if family == "gemma3":  # a wrapper with pictures around the text model
        family = "gemma3_text"
        text = Fields(hf, {}, where).table("text_config")
        outer = {key: hf[key] for key in ("eos_token_id", "bos_token_id", "quantization_config") if key in hf}
        values = {**text, **outer, "tie_word_embeddings": hf.get("tie_word_embeddings", True)}
    for key, neutral in NEUTRAL.items():
        if values.get(key) not in neutral:
            raise ValueError(f"{where} sets {key}, which Forerun does not support: take a model without it")
    fields = Fields(values, DEFAULTS[family], where)
    return _build(family, fields, Fields(generation or {}, {}, "generation_config.json"))


def _build(family: str, fields: Fields, generation: Fields) -> ModelConfig:
    gemma = family == "gemma3_text"
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.maybe_integer("num_key_value_heads") or heads
    head_dim = fields.maybe_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(f"{fields.where}: {heads} heads do not divide hidden_size {hidden}: add head_dim")
        head_dim = hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{fields.where}: {heads} heads of size {head_dim} do not fit {kv_heads} key-value heads: "
            "correct num_key_value_heads or head_dim"
        )
    bias = family not in ("mistral", "mixtral") and fields.flag("attention_bias")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(family, fields),
        context_length=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", above=0),
        activation=_activation(fields, "hidden_activation" if gemma else "hidden_act"),
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=bias or family in ("qwen2", "mimo"),
        output_bias=bias and family not in ("qwen2", "mimo"),
        mlp_bias=family in ("llama", "smollm3") and fields.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        norm_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        # transformers rounds the scale to the type of the weights before it multiplies: whoever uses it must too.
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar", above=0) ** -0.5 if gemma else None,
        **_experts(family, fields),
        eos=_eos(fields, generation),
        bos=_bos(fields, generation),
        family=family,
    )


def _activation(fields: Fields, key: str) -> Activation:
    name = fields.text(key)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"{fields.where} asks for the activation {name!r}, and Forerun knows {known}: take another model"
        )
    return ACTIVATIONS[name]


def _experts(family: str, fields: Fields) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    mixtral = family == "mixtral"
    experts = fields.integer("num_local_experts", "num_experts")
    chosen = fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"{fields.where}: {chosen} of {experts} experts per token: correct num_experts_per_tok")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_size": fields.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        "normalise_expert_weights": mixtral or fields.flag("norm_topk_prob"),
    }


# --- layers ---------------------------------------------------------------------------------------------------


def _layers(family: str, fields: Fields) -> tuple[Layer, ...]:
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = _kinds(family, fields, count)
    window = fields.maybe_integer("sliding_window")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(f"{fields.where} has sliding layers and no sliding_window: add it")
    ropes = ropes_from_hf(fields, THETA.get(family, 10_000.0), 10_000.0 if family == "gemma3_text" else None)
    turned = _turned(family, fields, count)
    sparse = _sparse(family, fields, count)
    return tuple(
        Layer(
            rope=ropes[kind] if turned[index] else None,
            window=window if kind == "sliding_attention" else None,
            experts=sparse[index],
        )
        for index, kind in enumerate(kinds)
    )


def _kinds(family: str, fields: Fields, count: int) -> list[str]:
    """`full_attention` or `sliding_attention`, per layer."""
    full, sliding = "full_attention", "sliding_attention"
    window = fields.raw("sliding_window") is not None
    if family == "llama":
        return [full] * count
    if family in ("mistral", "mixtral"):
        return [sliding if window else full] * count
    if family == "qwen3_moe":
        return [sliding if window and fields.flag("use_sliding_window") else full] * count
    if family != "gemma3_text" and not fields.flag("use_sliding_window"):
        return [full] * count
    listed = fields.items("layer_types", least=count)
    if listed is not None:
        for kind in listed:
            if kind not in (full, sliding):
                raise ValueError(f"{fields.where} has a layer of the kind {kind!r}: {_OTHER}")
        return listed[:count]
    if family == "gemma3_text":
        pattern = fields.integer("sliding_window_pattern")
        return [full if (index + 1) % pattern == 0 else sliding for index in range(count)]
    if family == "smollm3":  # the layers without positions are the ones that slide
        return [sliding if window and not turned else full for turned in _turned(family, fields, count)]
    first = fields.integer("max_window_layers", least=0)
    return [sliding if window and index >= first else full for index in range(count)]


def _turned(family: str, fields: Fields, count: int) -> list[bool]:
    """Whether a layer has positions."""
    if family != "smollm3":
        return [True] * count
    listed = fields.items("no_rope_layers", least=count)
    if listed is not None:
        return [bool(flag) for flag in listed[:count]]
    interval = fields.integer("no_rope_layer_interval")
    return [(index + 1) % interval != 0 for index in range(count)]


def _sparse(family: str, fields: Fields, count: int) -> list[bool]:
    """Whether a layer has experts."""
    if family != "qwen3_moe":
        return [family == "mixtral"] * count
    dense = fields.items("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


# --- where a text begins and ends -----------------------------------------------------------------------------


def _eos(fields: Fields, generation: Fields) -> tuple[int, ...]:
    source = generation if generation.raw("eos_token_id") is not None else fields
    value = source.raw("eos_token_id")
    if isinstance(value, list):
        return tuple(
            Fields({"eos_token_id": each}, {}, source.where).integer("eos_token_id", least=0) for each in value
        )
    return () if value is None else (source.integer("eos_token_id", least=0),)


def _bos(fields: Fields, generation: Fields) -> int | None:
    source = generation if generation.raw("bos_token_id") is not None else fields
    return source.maybe_integer("bos_token_id", least=0)
