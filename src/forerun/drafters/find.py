"""Drafters by name: the name is the file's."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import forerun.drafters
from forerun.drafters.drafter import Drafter
from forerun.drafters.kinds import cheap_nodes
from forerun.models.heads.files import method_of
from forerun.models.target import TargetModel

HELPERS = frozenset(
    {
        "confidence",
        "datastore",
        "device_growth",
        "draft_length",
        "drafter",
        "find",
        "growing",
        "growth_in_c",
        "head_ahead",
        "host_growth",
        "in_rounds",
        "kinds",
        "layer_choice",
        "layer_search",
        "level_run",
        "listed_rows",
        "rounds",
        "run_ahead",
        "side_growth",
        "side_run",
        "suffix_tree",
        "told",
        "trained",
        "trained_folder",
        "tree_levels",
        "tree_spec",
        "waiting_states",
    }
)
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
    fingerprint: Callable[[], str] | None = None
    """That of the target's tokenizer, where it is known: for files of tokens that were made earlier. Computed when
    asked for, since it takes the whole vocabulary."""
    folder: Path | None = None
    """Where the target's files are, which may have a drafter in them."""
    adaptive: bool = False
    """Whether the engine chooses how much is drafted: then a drafter need not see to it itself."""

    @property
    def nodes(self) -> int:
        """Drafted tokens where nothing else is known."""
        return cheap_nodes(self.target)


def names() -> list[str]:
    modules = pkgutil.iter_modules(forerun.drafters.__path__)
    return sorted(module.name for module in modules if module.name not in HELPERS)


def resolve(name: str, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The folder of a trained drafter stands for the drafter it was made for, with that folder as its option."""
    options = dict(options or {})
    if name in names():
        return name, options
    try:
        folder = Path(name).expanduser()
        found = folder.is_dir()
    except (OSError, RuntimeError):  # a name that cannot be one of a folder
        found = False
    if not found:
        return name, options
    method = method_of(folder)
    return ("draft_model", {"model": name} | options) if method == "draft" else (method, {"path": name} | options)


def read_options(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """The options of the drafter of that name; an option it does not have is refused. Needs no model, so that a typing
    mistake is told before one is loaded."""
    name, options = resolve(name, options)
    if name not in names():
        raise ValueError(f"there is no drafter {name!r}: use one of {', '.join(names())}")
    module = import_module(f"forerun.drafters.{name}")
    known = [field.name for field in fields(module.Options)]
    for key in options or {}:
        if key not in known:
            wanted = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the drafter {name} has no option {key!r}: {wanted}")
    kinds = get_type_hints(module.Options)
    return module.Options(**{key: _read(key, value, kinds[key]) for key, value in (options or {}).items()})


def make_drafter(name: str, setup: Setup, options: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of that name, or of a folder that `forerun train` made."""
    name, options = resolve(name, options)
    read = read_options(name, options)
    drafter: Drafter = import_module(f"forerun.drafters.{name}").make(read, setup)
    return drafter


def _read(key: str, value: Any, kind: Any) -> Any:
    """A number, true or false that came as text, from a command line or from the options of another drafter, as what it
    is; everything else as it was."""
    if kind is str and not isinstance(value, str):
        raise ValueError(f"the drafter option {key} is {value!r}: give it as a text, in quotes")
    if kind is bool and isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, str) or kind not in (int, float):
        return value
    try:
        return kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"the drafter option {key} is {value!r}: give {wanted}") from None
