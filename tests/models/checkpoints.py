"""Tiny models with random weights, as folders and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def make(family: str, **changes: Any) -> PreTrainedModel:
    """A model of `transformers`, such as `Llama`, whose norms are not all ones."""
    torch.manual_seed(1)
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.eval()
    return cast(PreTrainedModel, model)


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Under our names, which are those of the modules."""
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


# --- GGUF -----------------------------------------------------------------------------------------------------

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
}
BYTES: list[str] = list(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
TOKENS = [*BYTES, "<|start|>", "<|end|>", "he", "ll", "llo", "Ġw", "hello", "12"]
MERGES = ["h e", "l l", "ll o", "Ġ w", "he llo", "1 2"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_level_vocabulary(writer: gguf.GGUFWriter, pre: str = "smollm", tokens: list[str] | None = None) -> None:
    tokens = tokens or [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), SMALL["vocab_size"]))]
    kinds = [3 if token.startswith("<|") else 5 if token.startswith("[PAD") else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order in which llama.cpp turns them: 0, size/2, 1, size/2 + 1, …"""
    size = tensor.shape[0] // heads
    order = [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return tensor[order]


def gguf_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Names from the `gguf` package, which knows those of Hugging Face."""
    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights(model).items():
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            parts = {f"{name[:-12]}gate_proj.weight": gate, f"{name[:-12]}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": tensor}
        for key, value in parts.items():
            known = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert known is not None, key
            tensors[known] = value + 1 if architecture == "gemma3" and known.endswith("norm.weight") else value
            for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
                if architecture in ("llama", "smollm3") and f".attn_{kind}." in known:
                    tensors[known] = interleave(value, heads)
    return tensors


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    pre: str = "smollm",
    more: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """`kind` for what has rows that fit its blocks, F32 for the rest."""
    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    byte_level_vocabulary(writer, pre)
    for key, value in (more or {}).items():
        add_value(writer, key, value)
    for name, tensor in {**gguf_tensors(model), **(extra or {})}.items():
        if name not in drop:
            add_tensor(writer, name, tensor.numpy(), kind)
    finish(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            writer.add_string(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray[Any, Any], kind: Kind) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if data.ndim < 2 or data.shape[-1] % block:
        kind = Kind.F32
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
