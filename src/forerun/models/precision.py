"""The number formats that models run in, by name."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """`auto` takes bfloat16 where the device multiplies it natively, and float32 elsewhere."""
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no number format: choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def default_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if kind == "cpu" and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it (AVX512-BF16, AMX, or Arm's BF16), not whether PyTorch can imitate
    them, which is slower than float32."""
    features = torch.cpu.get_capabilities()
    return any(bool(features.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
