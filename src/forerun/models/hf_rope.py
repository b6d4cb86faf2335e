"""Rotary positions as Hugging Face spells them: old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forerun.models.config import Rope
from forerun.models.fields import Fields

KINDS = ("default", "linear", "llama3", "yarn")
NESTED = ("full_attention", "sliding_attention")
"""What kinds of layers may have positions of their own."""


def ropes_from_hf(fields: Fields, theta: float, local_theta: float | None = None) -> dict[str, Rope]:
    """The positions of each kind of layer. `theta` and `local_theta` are what the family takes where nothing is said;
    `local_theta` is given for a family whose sliding layers are never scaled (Gemma-3)."""
    nested = fields.table("rope_parameters")
    scaling = fields.table("rope_scaling")
    theta = fields.number("rope_theta", above=1) if fields.raw("rope_theta") is not None else theta
    plain: Mapping[str, Any] = scaling or nested
    tables = Fields(nested, {}, f"{fields.where}, rope_parameters")
    per_kind = {kind: tables.table(kind) for kind in NESTED} if any(kind in nested for kind in NESTED) else {}
    if local_theta is not None:  # as Gemma-3: `rope_scaling` is about the global layers
        if fields.raw("rope_local_base_freq") is not None:
            local_theta = fields.number("rope_local_base_freq", above=1)
        full = {**per_kind.get("full_attention", {}), **scaling} if per_kind or scaling else dict(nested)
        local = per_kind.get("sliding_attention", {})
        return {"full_attention": _rope(fields, full, theta), "sliding_attention": _rope(fields, local, local_theta)}
    if per_kind and not scaling:
        return {kind: _rope(fields, per_kind[kind], theta) for kind in NESTED}
    return dict.fromkeys(NESTED, _rope(fields, plain, theta))


def _rope(fields: Fields, values: Mapping[str, Any], theta: float) -> Rope:
    given = Fields(values, {"rope_theta": theta}, f"{fields.where}, positions (rope)")
    kind = given.text("rope_type", "type") if given.raw("rope_type", "type") is not None else "default"
    if kind not in KINDS:
        raise ValueError(
            f"{fields.where} asks for positions of the kind {kind!r}, and Forerun knows {', '.join(KINDS)}: "
            "take another model"
        )
    share = given.raw("partial_rotary_factor")
    if (share if share is not None else fields.raw("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError(f"{fields.where} turns only a part of each head (partial_rotary_factor): take another model")
    if given.raw("mrope_section") is not None:
        raise ValueError(f"{fields.where} has positions in several dimensions (mrope_section): take another model")
    base = given.number("rope_theta", above=1)
    context = fields.integer("max_position_embeddings")
    match kind:
        case "linear":
            return Rope(base, "linear", given.number("factor", above=0))
        case "llama3":
            return Rope(
                base,
                "llama3",
                given.number("factor", above=0),
                _original(fields, given, context),
                given.number("low_freq_factor", above=0),
                given.number("high_freq_factor", above=0),
            )
        case "yarn":
            return _yarn(fields, given, base, context)
        case _:
            return Rope(base)


def _original(fields: Fields, given: Fields, context: int) -> int:
    key = "original_max_position_embeddings"
    if fields.raw(key) is not None:  # outside the table it has priority in transformers
        return fields.integer(key)
    return given.integer(key) if given.raw(key) is not None else context


def _yarn(fields: Fields, given: Fields, base: float, context: int) -> Rope:
    """The attention factor is always spelled out here, so that nobody has to know which default applies."""
    if given.raw("truncate") not in (None, True):
        raise ValueError(f"{fields.where} asks for yarn without truncation (truncate: false): take another model")
    original = _original(fields, given, context)
    factor = given.number("factor", above=0) if given.raw("factor") is not None else context / original
    if given.raw("attention_factor") is not None:
        attention = given.number("attention_factor")
    elif given.raw("mscale") and given.raw("mscale_all_dim"):
        attention = _mscale(factor, given.number("mscale")) / _mscale(factor, given.number("mscale_all_dim"))
    else:
        attention = _mscale(factor, 1.0)
    fast = given.number("beta_fast", above=0) if given.raw("beta_fast") else 32.0
    slow = given.number("beta_slow", above=0) if given.raw("beta_slow") else 1.0
    return Rope(base, "yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention)


def _mscale(factor: float, weight: float) -> float:
    """Equation 22 of the YaRN paper (arXiv 2309.00071), weighted as DeepSeek does."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
