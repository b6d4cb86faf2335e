"""How a drafter is told to draft so many tokens: the options that a user writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import resolve
from forerun.drafters.tree_spec import TreeSpec

BY_NUMBER = {
    "ngram": "tokens",
    "suffix": "tokens",
    "combine": "tokens",
    "recycling": "nodes",
    "retrieval": "candidates",
}
"""Drafters with an option that says how many tokens are drafted."""
SIZES, FEW_SIZES = (1, 2, 4, 8, 15, 31, 63), (2, 8, 31)
"""The few where a model grows each tree anew."""
LONG_CHAIN = "8"
"""What a drafter that can draft chains is tried with besides its own tree."""


def variants(name: str, options: Mapping[str, str]) -> list[dict[str, str]]:
    """The options to try a drafter with: as it is, and a chain where it can draft any and nothing was said."""
    method, own = resolve(name, options)
    module = import_module(f"forerun.drafters.{method}")
    asked = {key: str(value) for key, value in dict(options).items()}
    free = method not in BY_NUMBER and method not in WHOLE_ONLY
    has_tree = any(field.name == "tree" for field in fields(module.Options))
    return [asked, {**asked, "tree": LONG_CHAIN}] if free and has_tree and "tree" not in own else [asked]


WHOLE_ONLY = frozenset({"layer_skip", "lookahead", "parallel", "multi_draft"})
"""Drafters that are used as they are: smaller drafts of theirs are no cut of larger ones, or they choose themselves."""


def sizes_of(name: str, drafter: Drafter) -> tuple[int, ...]:
    """Drafted tokens of a text that are tried, as far as it drafts as many, besides all that it likes."""
    if resolve(name)[0] in WHOLE_ONLY:
        return ()
    grown = drafter.branches and isinstance(getattr(drafter, "spec", None), TreeSpec)
    return FEW_SIZES if grown else SIZES


def options_for(name: str, drafter: Drafter, size: int) -> dict[str, str] | None:
    """That make it draft at most `size` tokens for a text; None where there is no way to say it."""
    method = resolve(name)[0]
    if method in BY_NUMBER:
        return {BY_NUMBER[method]: str(size)}
    spec: Any = getattr(drafter, "spec", None)
    if not isinstance(spec, TreeSpec):
        return None
    if spec.kind == "chain" or size == 1:
        return {"tree": str(size)}
    if spec.kind == "dynamic":
        width, depth, _ = spec.numbers
        return {"tree": f"dynamic:{min(width, size)},{min(depth, size)},{size}"}
    if spec.kind == "static":
        return {"tree": f"static:{size}"}
    return None
