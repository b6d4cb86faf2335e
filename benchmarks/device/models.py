"""The models that are measured: the default one, and the same function at the size of an 8B model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.engine.loaded import LoadedModel
from forerun.models.config import ModelConfig
from forerun.models.enlarge import enlarge
from forerun.models.enlarge_folder import find_shape
from forerun.models.heads.enlarge_head import enlarge_head
from forerun.models.heads.files import read_head, write_head
from forerun.models.tokenizer import Tokenizer
from forerun.models.transformer import Transformer

DRAFT_LAYERS = 4
"""Of the small model, for a draft model that is often right and often wrong."""
SHORT = "short"
"""Its name."""


@dataclass(frozen=True)
class Measured:
    name: str
    model: LoadedModel
    small: ModelConfig | None = None
    """What it was before it was enlarged."""

    def drafter(self, folder: Path, place: Path) -> Path:
        """A trained drafter of the small model, for this one; what has to be made is made in `place`."""
        if self.small is None:
            return folder
        write_head(place / folder.name, enlarge_head(read_head(folder), self.small, self.target))
        return place / folder.name

    @property
    def target(self) -> Transformer:
        assert isinstance(self.model.target, Transformer)
        return self.model.target

    @property
    def weight_bytes(self) -> int:
        """What a pass reads: every matrix once; of the embedding only some rows, unless it is the head too."""
        target = self.target
        read = sum(p.numel() * p.element_size() for p in target.model.layers.parameters())
        return read + target.lm_head.weight.numel() * target.lm_head.weight.element_size()


def load(name: str, source: str, device: str, dtype: str = "bfloat16") -> Measured:
    """`name` is 135M, or 8B for the enlarged one."""
    if name == "135M":
        small = LoadedModel.load(source, dtype=dtype, device=device)
        assert isinstance(small.target, Transformer)
        return Measured(name, _beside(small, small.target))
    plain = LoadedModel.load(source, dtype="float32", device="cpu")
    assert isinstance(plain.target, Transformer)
    kind = getattr(torch, dtype)
    there = LoadedModel.load(source, dtype=dtype, device=device)
    large = enlarge(plain.target, find_shape("llama-3-8b"), dtype=kind, device=device)
    return Measured(name, _beside(there, large), plain.target.config)


def _beside(model: LoadedModel, target: Transformer) -> LoadedModel:
    """The target with what `model` can load, and with a part of `model` itself by the name of `SHORT`."""
    draft, load = first_layers(model.target, DRAFT_LAYERS), model.load_beside
    return replace(model, target=target, load_beside=lambda name: draft if name == SHORT else load(name))


def first_layers(model: Any, count: int) -> Transformer:
    """With the whole model's embedding, norm and head; the tensors are shared."""
    config = replace(model.config, layers=model.config.layers[:count])
    with torch.device("meta"):
        short = Transformer(config)
    kept = {name: tensor for name, tensor in model.state_dict().items() if name in short.state_dict()}
    short.load_state_dict(kept, assign=True)
    if config.tied:
        short.tie()
    return short.requires_grad_(False).eval()


def in_transformers(target: Transformer, tokenizer: Tokenizer) -> Any:
    """The same weights in `transformers`. Tensors are shared where they can be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = target.config
    rope = config.layers[0].rope
    assert rope is not None
    assert rope.kind == "default"
    hf = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=len(config.layers),
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=config.tied,
        eos_token_id=sorted(tokenizer.eos),
        pad_token_id=0,
        dtype=target.dtype,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(hf)  # type: ignore[no-untyped-call]
    model.requires_grad_(False)  # first: what a pass has made cannot be given gradients
    weights = dict(target.state_dict())
    if config.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf)  # its numbers are no weights
    return model.to(target.device).eval()
