"""Drafters by name: the name is the file's."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import forerun.drafters
from forerun.drafters.drafter import Drafter
from forerun.models.target import TargetModel

HELPERS = frozenset({"drafter", "find", "tree_spec"})
"""Modules of this package that are not drafters. Every other one defines `Options` and `make`."""


@dataclass(frozen=True)
class Setup:
    """What a drafter may need besides its own options."""

    target: TargetModel
    slots: int
    """How many tokens the target's cache holds; a drafter's own cache should hold as many."""
    load: Callable[[str], TargetModel]
    """Loads another model with the same tokenizer, in the target's precision and on its device; refuses one whose
    tokenizer differs."""


def names() -> list[str]:
    modules = pkgutil.iter_modules(forerun.drafters.__path__)
    return sorted(module.name for module in modules if module.name not in HELPERS)


def make_drafter(name: str, setup: Setup, options: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of that name. An option it does not have is refused."""
    if name not in names():
        raise ValueError(f"there is no drafter {name!r}: use one of {', '.join(names())}")
    module = import_module(f"forerun.drafters.{name}")
    known = [field.name for field in fields(module.Options)]
    for key in options or {}:
        if key not in known:
            wanted = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the drafter {name} has no option {key!r}: {wanted}")
    drafter: Drafter = module.make(module.Options(**(options or {})), setup)
    return drafter
