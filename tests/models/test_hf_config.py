"""Configs of Hugging Face: the same numbers as transformers, old spellings and new, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from forerun.models.config import Layer, ModelConfig, Rope
from forerun.models.hf_config import DEFAULTS, THETA, config_from_hf, is_ours


class MiMoConfig(transformers.Qwen2Config):  # type: ignore[no-untyped-call]  # as its makers publish it
    model_type = "mimo"


CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2": transformers.Qwen2Config,
    "mimo": MiMoConfig,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "smollm3": transformers.SmolLM3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
}


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    assert set(DEFAULTS) == set(CLASSES)
    theirs: Any = CLASSES[family]()
    for key, value in DEFAULTS[family].items():
        if hasattr(theirs, key) and key not in ("head_dim", "num_key_value_heads", "sliding_window"):
            assert getattr(theirs, key) == value, key
    bare = config_from_hf({"model_type": family})
    full = config_from_hf(theirs.to_dict())
    assert bare == full
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    heads = theirs.num_key_value_heads or theirs.num_attention_heads
    assert (bare.head_dim, bare.kv_heads) == (size, heads)
    assert len(bare.layers) == theirs.num_hidden_layers
    rope = theirs.rope_parameters
    assert THETA.get(family, 10_000.0) == rope.get("full_attention", rope)["rope_theta"]


@pytest.mark.parametrize("family", CLASSES)
def test_families(family: str) -> None:
    config = config_from_hf({"model_type": family, "num_hidden_layers": 2})
    assert config.family == family
    assert config.qk_norm == (family in ("qwen3", "qwen3_moe", "gemma3_text"))
    assert config.qkv_bias == (family in ("qwen2", "mimo"))
    assert not config.output_bias
    assert (config.experts > 0) == (family in ("mixtral", "qwen3_moe"))
    assert is_ours({"model_type": family})


def test_biases() -> None:
    for family, mlp in (("llama", True), ("smollm3", True), ("qwen3", False), ("qwen3_moe", False)):
        config = config_from_hf({"model_type": family, "attention_bias": True, "mlp_bias": True})
        assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, mlp)
    mimo = config_from_hf({"model_type": "mimo", "attention_bias": True})
    assert (mimo.qkv_bias, mimo.output_bias) == (True, False)
    mistral = config_from_hf({"model_type": "mistral", "attention_bias": True})
    assert not mistral.qkv_bias


# --- layers ---------------------------------------------------------------------------------------------------


def test_windows() -> None:
    assert windows(config_from_hf({"model_type": "mistral", "num_hidden_layers": 2})) == [4096, 4096]
    assert (
        windows(config_from_hf({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None})) == [None] * 2
    )
    qwen = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}
    assert windows(config_from_hf(qwen)) == [None] * 3
    assert windows(config_from_hf({**qwen, "use_sliding_window": True})) == [None, 8, 8]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(config_from_hf({**qwen, "use_sliding_window": True, "layer_types": kinds})) == [8, None, 8]
    assert windows(config_from_hf({**qwen, "use_sliding_window": False, "layer_types": kinds})) == [None] * 3
    moe = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "sliding_window": 8}
    assert windows(config_from_hf(moe)) == [None] * 2
    assert windows(config_from_hf({**moe, "use_sliding_window": True})) == [8, 8]


def test_layers_without_positions() -> None:
    config = config_from_hf({"model_type": "smollm3", "num_hidden_layers": 5})
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True, False]
    listed = {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]}
    assert [layer.rope is None for layer in config_from_hf(listed).layers] == [True, False, True]
    sliding = config_from_hf({**listed, "use_sliding_window": True, "sliding_window": 4})
    assert windows(sliding) == [4, None, 4]


def test_gemma() -> None:
    text: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 7,
        "sliding_window": 512,
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 168,
    }
    config = config_from_hf(text)
    assert windows(config) == [512] * 5 + [None, 512]
    assert config.layers[5] == Layer(Rope(1e6, "linear", 8.0))
    assert config.layers[0] == Layer(Rope(5e3), window=512)
    assert config.embedding_scale == math.sqrt(1152)
    assert config.attention_scale == 168**-0.5
    assert (config.norm_offset, config.sandwich_norms, config.activation) == (1.0, True, "gelu_tanh")
    assert windows(config_from_hf({**text, "sliding_window_pattern": 2})) == [512, None] * 3 + [512]
    nested = {
        **{key: value for key, value in text.items() if not key.startswith("rope")},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    }
    assert config_from_hf(nested) == config
    assert (
        config_from_hf(
            transformers.Gemma3TextConfig(**{k: v for k, v in text.items() if k != "model_type"}).to_dict()
        ).layers
        == config.layers
    )
    wrapped = config_from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert wrapped.layers == config.layers
    assert wrapped.eos == (1, 106)
    assert wrapped.tied


def test_experts() -> None:
    base = {"model_type": "qwen3_moe", "num_hidden_layers": 6}
    assert [layer.experts for layer in config_from_hf(base).layers] == [True] * 6
    config = config_from_hf({**base, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True})
    assert [layer.experts for layer in config.layers] == [False, True, False, False, False, True]
    assert config.normalise_expert_weights
    assert not config_from_hf(base).normalise_expert_weights
    mixtral = config_from_hf({"model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4})
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.expert_size) == (4, 2, 64)
    assert mixtral.normalise_expert_weights


# --- positions ------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES = [
    ({"rope_theta": 5e5}, Rope(5e5)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
    ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(1e4, "linear", 2.0)),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0)),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        Rope(1e4, "yarn", 4.0, 512, attention_factor=0.1 * math.log(4) + 1),
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}},
        Rope(1e4, "yarn", 4.0, 2048, beta_fast=16, beta_slow=2, attention_factor=1.5),
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}},
        Rope(1e4, "yarn", 4.0, 2048, attention_factor=(0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ),
]


@pytest.mark.parametrize(("values", "rope"), ROPES)
def test_positions(values: dict[str, Any], rope: Rope) -> None:
    assert config_from_hf({"model_type": "llama", **values}).layers[0].rope == rope


def test_positions_by_kind_of_layer() -> None:
    values = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e3}},
    }
    assert [layer.rope for layer in config_from_hf(values).layers] == [Rope(1e6), Rope(1e3)]


# --- begin and end ----------------------------------------------------------------------------------------------


def test_ends() -> None:
    assert config_from_hf({"model_type": "llama"}).eos == (2,)
    assert config_from_hf({"model_type": "llama", "eos_token_id": [3, 4]}).eos == (3, 4)
    assert config_from_hf({"model_type": "llama", "eos_token_id": None}).eos == ()
    assert config_from_hf({"model_type": "llama", "eos_token_id": 3}, {"eos_token_id": [5, 6]}).eos == (5, 6)
    assert config_from_hf({"model_type": "llama", "eos_token_id": 3}, {"temperature": 1.0}).eos == (3,)
    assert config_from_hf({"model_type": "qwen3"}).bos is None
    assert config_from_hf({"model_type": "llama", "bos_token_id": 0}).bos == 0


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "family 'gpt2'"),
        ({}, "family None"),
        ({"model_type": "llama", "hidden_act": "relu"}, "'relu'"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kind 'dynamic'"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "factor must be a number, not None"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be"),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncat"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3", "text_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "no sliding_window"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size must be a whole number of at least 1, not 0"),
        ({"model_type": "llama", "hidden_size": "large"}, "hidden_size must be"),
        ({"model_type": "llama", "hidden_size": True}, "hidden_size must be"),
        ({"model_type": "llama", "rms_norm_eps": None}, "rms_norm_eps must be a number"),
        ({"model_type": "llama", "num_attention_heads": 7}, "7 heads do not divide"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "5 key-value heads"),
        ({"model_type": "llama", "tie_word_embeddings": "yes"}, "true or false"),
        ({"model_type": "llama", "rope_scaling": 3}, "an object"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "a list of at least 36"),
        ({"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 26}, "'chunked_attention'"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"model_type": "llama", "eos_token_id": ["x"]}, "eos_token_id must be"),
        ({"model_type": []}, r"family \[\]"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number of at most"),
        ({"model_type": "llama", "num_hidden_layers": 1e300}, "num_hidden_layers must be a whole number of at most"),
        ({"model_type": "gemma3_text", "hidden_size": 10**400}, "hidden_size must be a whole number of at most"),
        ({"model_type": "mistral", "sliding_window": 10**30}, "sliding_window must be a whole number of at most"),
        ({"model_type": "llama", "rms_norm_eps": 10**400}, "rms_norm_eps must be a number, not 1000"),
        ({"model_type": "llama", "rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, not nan"),
        ({"model_type": "llama", "rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, not -1"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
        ({"model_type": "llama", "rope_theta": 0}, "rope_theta must be a number above 1, not 0"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number above 0"),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 0.0}}, "factor must be a number above 0"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}},
            "beta_fast must be a number above 0",
        ),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0, "high_freq_factor": 4.0},
            },
            "low_freq_factor must be a number above 0",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, "full_attention must be an object"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        config_from_hf(values, where="there/config.json")
    assert str(refusal.value).startswith("there/config.json")
    assert ": " in str(refusal.value)  # the fix
