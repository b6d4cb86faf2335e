"""Functions in a compiled form on an accelerator, where that works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """Compiled when first called. Where the compiler fails, which depends on much that is not ours, the function itself
    does it, and it is told once."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.fast: Callable[P, R] | None = torch.compile(function, dynamic=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.fast is not None:
            try:
                return self.fast(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler raises
                self.fast = None
                reason = " ".join(str(error).split())[:160]
                warnings.warn(f"training goes on without torch.compile ({reason})", RuntimeWarning, stacklevel=2)
        return self.function(*args, **kwargs)


def maybe_compiled(function: Callable[P, R], wanted: bool, device: torch.device) -> Callable[P, R]:
    return Compiled(function) if wanted and device.type == "cuda" else function
