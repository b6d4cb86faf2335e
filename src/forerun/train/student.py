"""The student: a transformer of the target's family with few layers, which begins as parts of the target.

It is described by the target's own config.json with other sizes, so every family that can be loaded can be drafted
for, and the student's folder is read like any other. Its layers begin as the target's, spread from the first to the
last; embedding, head and norms are the target's too. Where sizes differ, weights begin as noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.models.hf_config import config_from_hf
from forerun.models.transformer import Transformer

SPREAD = 0.02
"""The standard deviation of weights that have nothing to begin with."""
DENSE = {"mixtral": "mistral", "qwen3_moe": "qwen3"}
"""The family of a student whose target has experts: a draft has to be quick, and one MLP is."""
PER_LAYER = ("layer_types", "no_rope_layers")


@dataclass(frozen=True)
class StudentShape:
    layers: int = 2
    hidden: int | None = None
    """The width; the target's where None."""
    draft_vocabulary: int | None = None
    """Of one that shares the target's matrices: how many tokens can be drafted; 0 for all, None for 8192."""
    own_matrices: bool = False
    """Whether it has an embedding and a head of its own, though it could share the target's."""

    def shares(self, target: ModelConfig) -> bool:
        """Whether it reads and speaks with the target's own matrices: it can where it is as wide, and where the
        target's layers are such as a draft may begin as."""
        experts = any(layer.experts for layer in target.layers)
        return not (self.own_matrices or experts) and self.hidden in (None, target.hidden_size)


def text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what is around the text model."""
    if hf.get("model_type") == "gemma3":  # which reads pictures too
        return {"eos_token_id": hf.get("eos_token_id"), **hf["text_config"], "model_type": "gemma3_text"}
    return dict(hf)


def student_hf_config(hf: Mapping[str, Any], target: ModelConfig, shape: StudentShape) -> dict[str, Any]:
    """The student's config.json, made from the target's."""
    if not 1 <= shape.layers <= len(target.layers):
        raise ValueError(f"--layers is {shape.layers}: the target has {len(target.layers)}, so give 1 to that many")
    hidden = shape.hidden or target.hidden_size
    if hidden % target.head_dim:
        raise ValueError(f"--hidden is {hidden}: give a multiple of {target.head_dim}, the size of a head")
    same = hidden == target.hidden_size
    heads = target.heads if same else hidden // target.head_dim
    hf = text_part(hf)
    made = {key: value for key, value in hf.items() if key not in ("torch_dtype", "forerun_enlarged")}
    made |= {
        "model_type": DENSE.get(str(hf["model_type"]), hf["model_type"]),
        "num_hidden_layers": shape.layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(count for count in range(1, target.kv_heads + 1) if heads % count == 0),
        "head_dim": target.head_dim,
        "intermediate_size": round(target.intermediate_size * hidden / target.hidden_size),
        "tie_word_embeddings": target.tied,
        "dtype": "bfloat16",
    }
    if made["model_type"] != hf["model_type"]:  # whose defaults are others
        made.pop("architectures", None)
        made.setdefault("sliding_window", None)
    for key in PER_LAYER:
        if isinstance(made.get(key), list):
            made[key] = made[key][: shape.layers]
    return made


def new_student(hf: Mapping[str, Any], target: Transformer, seed: int) -> Transformer:
    """A student of the sizes in `hf`, in float32 on the target's device, ready to learn."""
    config = config_from_hf(hf)
    student = Transformer(config).to(target.device)
    generator = torch.Generator().manual_seed(seed)
    theirs = dict(target.named_parameters())
    for name, weight in student.named_parameters():
        source = theirs.get(_source(name, len(config.layers), len(target.config.layers)))
        with torch.no_grad():
            if source is not None and source.shape == weight.shape:
                weight.copy_(source)
            else:
                weight.copy_(_noise(name, weight, config, generator))
    return student.requires_grad_(True)


def _source(name: str, layers: int, of_layers: int) -> str:
    """The target's name for a weight: layers are spread from its first to its last."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        index = int(parts[2])
        parts[2] = str(round(index * (of_layers - 1) / max(1, layers - 1)))
    return ".".join(parts)


def _noise(name: str, weight: Tensor, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.full(weight.shape, 1.0 - config.norm_offset)
    if name.endswith("bias"):
        return torch.zeros(weight.shape)
    return torch.randn(weight.shape, generator=generator) * SPREAD


def frozen(student: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy to draft with, as the student is now."""
    with torch.device("meta"):
        copy = Transformer(student.config)
    weights = {name: weight.detach().clone().to(dtype) for name, weight in student.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    if student.config.tied:
        copy.tie()
    return copy.requires_grad_(False).eval()
