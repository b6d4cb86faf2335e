"""Which forms of a kernel can run here: the plain one always, and the Triton source on a GPU or in its interpreter.

The interpreter must be chosen before Triton is imported, so it is done here, when tests are collected.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.kernels.kernel import Kernel

INSTALLED = importlib.util.find_spec("triton") is not None
ON_GPU = INSTALLED and torch.cuda.is_available()
if INSTALLED and not ON_GPU and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
INTERPRETED = INSTALLED and not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter() -> None:
    """Before Triton 3.8 loop bounds are made by `int` of an array of one number, which NumPy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


if INTERPRETED:
    mend_interpreter()


@pytest.fixture
def device() -> torch.device:
    """Where the Triton source runs in this run of the tests."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def built() -> Callable[[Kernel[Any, Any]], Any]:
    """The Triton form of a kernel."""
    if not INSTALLED:
        pytest.skip("Triton is not installed")
    if not (ON_GPU or INTERPRETED):
        pytest.skip("Triton was imported before its interpreter could be chosen")
    return lambda kernel: kernel.device
