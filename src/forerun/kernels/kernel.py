"""What a kernel is to its callers: one function, two forms, and the choice between them."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from functools import cache
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Kernel(Generic[P, T]):
    """Calls `device` where the first argument lies on a CUDA device and `plain` elsewhere.

    A kernel that cannot be built (no Triton, no compiler, too small a device) warns once and is plain from then on. An
    error of a kernel that was built is an error. While a graph is captured nothing can be built: run it once before.
    """

    def __init__(self, name: str, device: Callable[P, T], plain: Callable[P, T]) -> None:
        self.name, self.device, self.plain = name, device, plain
        self.broken: str | None = None
        """Why this kernel could not be built."""
        self.__doc__ = plain.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        assert isinstance(first, Tensor), "the first argument says where to run"
        if self.broken is None and first.is_cuda:
            try:
                return self.device(*args, **kwargs)
            except Exception as error:
                if not cannot_build(error):
                    raise
                self.broken = f"{type(error).__name__}: {error}".strip()
                warnings.warn(
                    f"the kernel {self.name} cannot be built here, so a slower plain form runs instead: {self.broken}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.plain(*args, **kwargs)


def cannot_build(error: Exception) -> bool:
    """Whether it comes from making a kernel (Triton missing or refusing, no C compiler), not from running one."""
    if isinstance(error, ImportError | subprocess.CalledProcessError):
        return True
    if any(kind.__module__.startswith("triton.") for kind in type(error).__mro__):
        return True
    return type(error) is RuntimeError and "C compiler" in str(error)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before still runs (programmatic dependent launch, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def ahead(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that waits by itself for the one before (`language.wait_for_the_one_before`)."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


def power_of_two(number: int) -> int:
    """The least one that is not smaller: Triton's tiles have no other sizes."""
    return 1 << max(0, number - 1).bit_length()
