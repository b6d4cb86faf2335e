"""Passes in bfloat16, on a CPU with AMX."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

from forerun.core.native import build
from forerun.models.config import ModelConfig
from forerun.models.native.in_c import Arithmetic, llama_like
from forerun.models.native.shelf import TILES

FLAGS = ["-O3", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")), "-mamx-tile"]
FLAGS += ["-mamx-bf16", "-mamx-int8"]


@cache
def library() -> ctypes.CDLL | None:
    """None where the processor, the system or the compiler is not up to it."""
    features = torch.cpu.get_capabilities()
    needed = ("amx_bf16", "amx_int8", "amx_tile", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16")
    if platform.system() != "Linux" or not all(features.get(name) for name in needed):
        return None
    found = build.load(Path(__file__).with_suffix(".c"), FLAGS)
    return found if found is not None and found.forerun_ask_for_tiles() == 0 else None


def supports(config: ModelConfig) -> bool:
    """Whether the pass is this model's."""
    return llama_like(config, 64) and library() is not None


def arithmetic() -> Arithmetic:
    found = library()
    assert found is not None
    return Arithmetic(found, torch.bfloat16, TILES, folds=None, byte_time=0.5)
