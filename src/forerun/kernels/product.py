"""The product of few rows with a large weight, as decoding has them: as fast as the weight can be read.

A row's bits do not depend on how many rows are beside it: a plan is chosen for a weight, never for the rows, and the
order of sums is the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.kernel import Kernel, overlaps, power_of_two
from forerun.kernels.rows import _is_silu, silu_mul

MOST_ROWS = 64
"""With more, a product is no longer bound by reading its weight alone, and cuBLAS is good at it."""

FULL = 96
"""Programs that draw all the bandwidth of a device of 132 processors, if each has enough on its way."""

SHARED = 200 << 10
"""Bytes that the steps on their way may take of a processor's memory (227 KiB on Hopper)."""

EARLY = 8 << 20
"""Bytes of a weight to ask for before the kernel before is over: two microseconds' worth, and a part of the cache."""


@dataclass(frozen=True)
class Plan:
    """How the work is cut. `splits` alone changes the order of sums, and whether `tile_n` is below 64 may (other
    instructions): the rest gives the same bits."""

    tile_n: int  # outputs of a program, gated as many of gate and of up; the tensor cores' widest instructions want 64
    tile_k: int  # of the depth, in a step
    splits: int  # of the depth
    warps: int
    stages: int  # steps on their way, one of them in use; fewer where they do not fit
    overlap: bool = True  # start while the kernel before runs, where the device can

    @classmethod
    def choose(cls, size: int, depth: int, gated: bool = False) -> Plan:
        """Tiles as large as fill the device, since each program reads all rows; splits only where none do."""
        tile_n = next((tile for tile in (64, 32, 16) if -(-size // tile) >= FULL), 16)
        tile_k = min(256, (4096 if gated else 8192) // tile_n)  # with 64 outputs, 16 KiB of weight in a step
        programs, steps = -(-size // tile_n), -(-depth // tile_k)
        splits = 1 << (max(1, min(FULL // programs, steps // 8)).bit_length() - 1)
        return cls(tile_n, tile_k, splits, warps=4, stages=4 if programs * splits > 132 else 6)


MEASURED: dict[tuple[int, int, bool], Plan] = {
    (6144, 4096, False): Plan(tile_n=64, tile_k=128, splits=1, warps=4, stages=6),
    (4096, 4096, False): Plan(tile_n=64, tile_k=128, splits=2, warps=4, stages=5),
    (28672, 4096, False): Plan(tile_n=256, tile_k=64, splits=1, warps=8, stages=4),
    (28672, 4096, True): Plan(tile_n=128, tile_k=64, splits=1, warps=8, stages=5),
    (4096, 14336, False): Plan(tile_n=128, tile_k=128, splits=4, warps=8, stages=4),
    (49152, 4096, False): Plan(tile_n=64, tile_k=128, splits=1, warps=4, stages=3),
    (960, 576, False): Plan(tile_n=32, tile_k=64, splits=1, warps=4, stages=6),
    (576, 576, False): Plan(tile_n=16, tile_k=64, splits=1, warps=4, stages=9),
    (3072, 576, False): Plan(tile_n=32, tile_k=64, splits=1, warps=4, stages=6),
    (3072, 576, True): Plan(tile_n=16, tile_k=64, splits=1, warps=4, stages=9),
    (576, 1536, False): Plan(tile_n=16, tile_k=64, splits=3, warps=4, stages=4),
    (49152, 576, False): Plan(tile_n=128, tile_k=64, splits=1, warps=4, stages=4),
}
"""The fastest plans that `benchmarks/product_device.py` found for weights [N, K] on an H200, gated or not."""


def supports(rows: int, weight: Tensor) -> bool:
    """Whether a product of so many rows gains. Others are right up to `MOST_ROWS`, but read the weight slowly."""
    aligned = weight.stride(1) == 1 and weight.stride(0) % 16 == 0 and weight.shape[1] % 16 == 0
    return 0 < rows <= MOST_ROWS and weight.dtype in {torch.bfloat16, torch.float16} and aligned


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, plan: Plan | None = None
) -> Tensor:
    """x [R, K], weight [N, K], bias [N] → [R, N]. `out` may be float32: then nothing is rounded at the end. `plan` is
    for tuning."""
    if out is not None and out.dtype != x.dtype:
        x, weight = x.to(out.dtype), weight.to(out.dtype)
        bias = None if bias is None else bias.to(out.dtype)
    result = functional.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def _device(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, plan: Plan | None = None
) -> Tensor:
    return _launch(x, weight, bias, out, plan, None)


def _plain_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """x [R, K], weight [2 · I, K] of the gate and, below, of up → [R, I]: `silu_mul` of the product."""
    result = silu_mul.plain(functional.linear(x, weight, bias), activation)
    return result if out is None else out.copy_(result)


def _device_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    return _launch(x, weight, bias, out, plan, activation)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, plan: Plan | None, activation: str | None
) -> Tensor:
    """`activation` is None for a product without a gate."""
    from forerun.kernels.gpu import product as gpu

    gated = activation is not None
    silu = activation is not None and _is_silu(activation)
    rows, depth = x.shape
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 0 < rows <= MOST_ROWS
    assert weight.shape[1] == depth
    assert x.dtype == weight.dtype
    assert x.dtype in {torch.bfloat16, torch.float16}
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    if plan is None:
        plan = MEASURED.get((weight.shape[0], depth, gated)) or Plan.choose(size, depth, gated)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (rows, size)
    assert out.stride(1) == 1
    pad = max(16, power_of_two(rows))
    steps = -(-depth // (plan.tile_k * plan.splits))
    overlap = plan.overlap and overlaps(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    early = _early(weight, steps * plan.tile_k) if overlap else 0
    pieces = max(1, 32 * plan.warps // plan.tile_n) if early else 0  # one for each thread, which asks for one at a time
    sums = out  # where there is one split
    if plan.splits > 1:
        sums = torch.empty(plan.splits, rows, weight.shape[0], dtype=torch.float32, device=x.device)
    gpu.multiply[(-(-size // plan.tile_n), plan.splits)](
        x, weight, x if bias is None else bias, sums, rows, size, depth, steps,
        x.stride(0), weight.stride(0), out.stride(0),
        ROWS=pad, TILE_N=plan.tile_n, TILE_K=plan.tile_k, EVEN=steps * plan.tile_k * plan.splits == depth,
        SPLIT=plan.splits > 1, BIAS=bias is not None, GATED=gated, SILU=silu,
        OVERLAP=overlap, PIECES=pieces, PIECE=early // max(1, pieces),
        num_warps=plan.warps, num_stages=_stages(plan, pad, gated), **options,
    )  # fmt: skip
    if plan.splits > 1:
        tile = 256
        gpu.add_splits[(rows, -(-size // tile))](
            sums, x if bias is None else bias, out, rows, size, out.stride(0),
            SPLITS=plan.splits, TILE=tile, BIAS=bias is not None, GATED=gated, SILU=silu, OVERLAP=overlap,
            num_warps=2, **options,
        )  # fmt: skip
    return out


def _stages(plan: Plan, pad: int, gated: bool) -> int:
    """The plan's where `pad` rows leave room for them; their number changes no bits."""
    step = ((2 if gated else 1) * plan.tile_n + pad) * plan.tile_k * 2
    return max(2, min(plan.stages, SHARED // step))


def _early(weight: Tensor, share: int) -> int:
    """How much of each row to ask for early: a power of two of at least 128, within the share of a split, or 0."""
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) % 8 == 0
    most = min(2048, share, weight.shape[1])
    if not aligned or most < 128:
        return 0
    wanted = max(128, EARLY // (2 * weight.shape[0]))
    return 1 << (min(wanted, most).bit_length() - 1)


skinny_product = Kernel("skinny_product", _device, _plain)
gated_product = Kernel("gated_product", _device_gated, _plain_gated)
