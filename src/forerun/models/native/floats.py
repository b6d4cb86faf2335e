"""Passes in float32, on any CPU that computes with vectors."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

from forerun.core.native import build
from forerun.models.config import ModelConfig
from forerun.models.native.in_c import Arithmetic, llama_like
from forerun.models.native.rows import FLAGS
from forerun.models.native.shelf import PANELS


@cache
def rows_are_cheap() -> bool:
    """Whether the processor has vectors of 512 bits: then a dozen rows take hardly longer than one."""
    return bool(torch.cpu.get_capabilities().get("avx512_f"))


@cache
def library() -> ctypes.CDLL | None:
    """None where the processor, the system or the compiler is not up to it."""
    wide = torch.cpu.get_capabilities().get("avx2") or platform.machine() in ("aarch64", "arm64")
    return build.load(Path(__file__).with_suffix(".c"), FLAGS) if wide else None


def rounds() -> bool:
    """Whether the processor multiplies whole numbers of 16 bits in pairs, twice as fast as float32."""
    found = library()
    if found is None:
        return False
    found.forerun_rounds.restype = ctypes.c_int64
    return bool(found.forerun_rounds())


def supports(config: ModelConfig) -> bool:
    """Whether the pass is this model's."""
    return llama_like(config, 16) and library() is not None


def arithmetic() -> Arithmetic:
    found = library()
    assert found is not None
    return Arithmetic(found, torch.float32, PANELS, folds=found)
