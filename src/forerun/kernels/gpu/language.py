"""Triton where it is installed, and stand-ins where it is not, so that every module can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

INSTALLED = importlib.util.find_spec("triton") is not None

tl: Any = importlib.import_module("triton.language") if INSTALLED else None

if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:  # Triton looks annotations up, and wants its own there; what is constexpr it knows by that name
    Value = tl.tensor if INSTALLED else object
    constexpr = tl.constexpr if INSTALLED else object


def jit(*varying: str) -> Callable[[Any], Any]:
    """`triton.jit`, or without Triton the function itself, which nobody calls.

    For `varying` numbers there is one build only; for others there are up to three, since Triton builds one for a
    number of 1 and one for multiples of 16, which tell it how memory is aligned.
    """

    def make(function: Any) -> Any:
        if not INSTALLED:
            return function
        return importlib.import_module("triton").jit(function, do_not_specialize=varying)

    return make


_built: list[None] = []


def built() -> int:
    """How many kernels were built in this process, or found built by an earlier one: either takes many times as long as
    a launch."""
    return len(_built)


def _count_builds() -> None:
    runtime = getattr(importlib.import_module("triton.knobs"), "runtime", None)
    before = getattr(runtime, "jit_post_compile_hook", None)

    def count(**told: Any) -> Any:
        _built.append(None)
        return before(**told) if before is not None else None

    if runtime is not None:
        runtime.jit_post_compile_hook = count


if INSTALLED:
    _count_builds()


@jit()
def wait_for_the_one_before(OVERLAP: constexpr) -> Value:
    """At the beginning of a kernel that is launched `ahead`: what follows may start too, and nothing is read or written
    before all that the kernel before wrote is there."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
