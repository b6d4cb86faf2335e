"""Whose weights a result speaks of: digests of the files that a model and a drafter are read from. A name or a folder
stays what it is when other weights are put there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.drafters import combine, draft_model
from forerun.drafters.find import read_options, resolve
from forerun.drafters.trained_folder import shipped_head
from forerun.engine.loaded import LoadedModel
from forerun.models.builtin import BUILTINS
from forerun.models.hub import fetch_from_hub
from forerun.models.identity import files_digest, weights_identity
from forerun.models.target import TargetModel
from forerun.models.transformer import Transformer

NAMING = ("path", "model", "store")
"""Options of drafters that name what they are read from."""


def model_digest(model: LoadedModel) -> str | None:
    """None for a model that was made in memory."""
    return None if model.folder is None else files_digest(model.folder)


def drafter_digest(name: str, options: Mapping[str, Any], target: TargetModel) -> str | None:
    """None for a drafter that has no weights, or none but the target's own."""
    return named_digest(_names(name, options, target))


def named_digest(names: Sequence[str]) -> str | None:
    """Of what users name: folders, files, models. None where one is not found, which is told where it is loaded."""
    with suppress(ValueError, OSError, RuntimeError):
        each = [_digest(name) for name in names]
        return each[0] if len(each) == 1 else _together(each) if each else None
    return None


def _digest(name: str) -> str:
    place = Path(name).expanduser()
    if place.exists():
        return files_digest(place)
    if name in BUILTINS:
        return BUILTINS[name].sha256[:32]  # its content is pinned
    return files_digest(fetch_from_hub(name, offline=True))


def _together(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def _names(name: str, options: Mapping[str, Any], target: TargetModel) -> list[str]:
    """Of all that a drafter is read from."""
    name, own = resolve(name, options)
    read = read_options(name, own)
    if isinstance(read, combine.Options):
        first = _names(read.first, combine.pairs("first_options", read.first_options), target)
        return first + _names(read.second, combine.pairs("second_options", read.second_options), target)
    named = [*getattr(read, "names", ()), *(value for key in NAMING if (value := getattr(read, key, "")))]
    if named or not isinstance(target, Transformer):
        return named
    shipped = shipped_head(draft_model.METHOD if name == "draft_model" else name, weights_identity(target))
    return [] if shipped is None else [str(shipped)]
