"""The choice between two forms."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor

from forerun.kernels.kernel import Kernel, cannot_build


class OnCuda(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cuda = True


def place() -> Tensor:
    return torch.zeros(1).as_subclass(OnCuda)


def plain(x: Tensor) -> str:
    return "plain"


def test_a_cpu_gets_the_plain_form_and_a_device_the_kernel() -> None:
    kernel = Kernel("test", lambda x: "device", plain)
    assert kernel(torch.zeros(1)) == "plain"
    assert kernel(place()) == "device"


def test_a_kernel_that_cannot_be_built_warns_once() -> None:
    tries = []

    def device(x: Tensor) -> str:
        tries.append(x)
        raise ModuleNotFoundError("No module named 'triton'")

    kernel = Kernel("test", device, plain)
    with pytest.warns(RuntimeWarning, match="the kernel test cannot be built here.*triton"):
        assert kernel(place()) == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(place()) == "plain"
    assert len(tries) == 1


def test_an_error_of_a_running_kernel_is_not_hidden() -> None:
    def device(x: Tensor) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        Kernel("test", device, plain)(place())


def test_what_counts_as_unbuildable() -> None:
    assert cannot_build(RuntimeError("Failed to find C compiler. Please specify via CC environment variable."))
    assert cannot_build(subprocess.CalledProcessError(1, "gcc"))
    assert not cannot_build(ValueError("x"))
    refusal = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    assert cannot_build(refusal("shared memory"))


def test_the_callers_side_does_not_import_triton() -> None:
    code = (
        "import sys, forerun.kernels.attention, forerun.kernels.rows, forerun.kernels.step\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'triton']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
