"""The verification rules as they run on a device that must not be asked, on a CPU."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
from torch import Tensor

import forerun.verify
from forerun.verify import batched, traversal


def _never(active: Tensor) -> bool:
    return False


def _all(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[0], device=mask.device)


def _masked(state: Tensor, chosen: Tensor, mask: Tensor, new: Tensor) -> None:
    wide = mask.view(-1, *[1] * (state.dim() - 1))
    state.copy_(torch.where(wide, new, state))


def _set(table: Tensor, at: Tensor, level: Tensor, hit: Tensor, new: Tensor) -> None:
    wide = hit.view(-1, *[1] * (new.dim() - 1))
    table[at, level] = torch.where(wide, new, table[at, level])


OTHER: dict[str, Callable[..., object]] = {"finished": _never, "concerned": _all, "put": _masked}
BRANCHES = {"batched": 3, "traversal": 1}
"""How often each module asks which device it is on: three times in the functions above, and in traversal's `_set`."""


@contextmanager
def elsewhere() -> Iterator[None]:
    """Rules on a CPU do what they do on a device that must not be asked: every round, all sequences, masks."""
    modules = [import_module(f"forerun.verify.{found.name}") for found in pkgutil.iter_modules(forerun.verify.__path__)]
    real = {name: getattr(batched, name) for name in OTHER}
    uses = [(m, name) for m in modules for name in OTHER if getattr(m, name, None) is real[name]]
    assert len({module for module, _ in uses}) > 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traversal, "_set", _set)
        for module, name in uses:
            patch.setattr(module, name, OTHER[name])
        yield
