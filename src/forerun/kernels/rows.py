"""What is done to each row between two products. In a dtype of 16 bits every kernel rounds where the plain model does
(`models/transformer.py`), so that both give the same rows but for the order of sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.kernel import Kernel, ahead, power_of_two


def _plain_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """x, residual [R, H], weight [H] → [R, H]. With a residual, x += residual first, in place."""
    if residual is not None:
        x += residual
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.float())).to(x.dtype)
    return wide.to(x.dtype) * weight


def _device_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    from forerun.kernels.gpu import rows as gpu

    size = x.shape[1]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gpu.rms_norm[(x.shape[0],)](
        x, x if residual is None else residual, weight, out, eps, offset,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        SIZE=size, PAD=power_of_two(size), ADD=residual is not None, OFFSET=bool(offset),
        num_warps=min(16, max(1, power_of_two(size) // 512)), **ahead(x.device),
    )  # fmt: skip
    return out


def _plain_gated(both: Tensor, activation: str = "silu") -> Tensor:
    """[R, 2 · I], gate and up side by side → [R, I]. `activation` is silu, or gelu in its tanh form."""
    gate, up = both.chunk(2, -1)
    return (functional.silu(gate) if _is_silu(activation) else functional.gelu(gate, approximate="tanh")) * up


def _device_gated(both: Tensor, activation: str = "silu") -> Tensor:
    from forerun.kernels.gpu import rows as gpu

    count, size = both.shape[0], both.shape[1] // 2
    assert both.stride(1) == 1
    out = torch.empty(count, size, dtype=both.dtype, device=both.device)
    tile = min(1024, power_of_two(size))
    gpu.gated[(count, -(-size // tile))](
        both,
        out,
        both.stride(0),
        out.stride(0),
        SIZE=size,
        TILE=tile,
        SILU=_is_silu(activation),
        num_warps=4,
        **ahead(both.device),
    )
    return out


def _is_silu(activation: str) -> bool:
    if activation not in {"silu", "gelu"}:
        raise ValueError(f"the activation {activation!r} is not known: use silu or gelu")
    return activation == "silu"


def _plain_rotate(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """The heads of R rows as they come from their product, [R, (heads + 2 · kv_heads) · D]: keys and values go to
    their slots of a layer's cache [slots, kv_heads, D], and queries [R, heads, D] are returned.

    cos and sin [max_positions, D / 2] turn queries and keys (in float32 if the tables are float32, else rounded like
    the plain model's); without them nothing is turned. q_norm and k_norm [D] normalise each head before. A slot of −1
    is written nowhere.
    """
    kv_heads, size = keys.shape[1:]
    every = qkv.view(qkv.shape[0], -1, size)
    q, k, v = torch.split(every, [every.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q = _plain_norm(q, q_norm, eps, offset=offset)
        k = _plain_norm(k, k_norm, eps, offset=offset)
    if cos is not None and sin is not None:
        c, s = cos[positions][:, None], sin[positions][:, None]
        q, k = _turned(q, c, s), _turned(k, c, s)
    kept = slots >= 0
    keys[slots[kept]] = k[kept]
    values[slots[kept]] = v[kept]
    return q.contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `models/rope.py` does it: in 16 bits only the first product is rounded by itself."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat(
        [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)], -1
    ).to(x.dtype)


def _device_rotate(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    from forerun.kernels.gpu import rows as gpu

    kv_heads, size = keys.shape[1:]
    rows, total = qkv.shape[0], qkv.shape[1] // size
    heads = total - 2 * kv_heads
    assert qkv.stride(1) == 1
    assert keys.stride()[1:] == values.stride()[1:] == (size, 1), "what a slot holds lies together"
    assert values.shape[2] == size, "keys and values of one size"
    assert cos is None or (sin is not None and cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0))
    assert (q_norm is None) == (k_norm is None)
    q = torch.empty(rows, heads, size, dtype=qkv.dtype, device=qkv.device)
    tile = 4 if rows <= 64 else 16  # few rows: more programs
    gpu.write_and_rotate[(rows, -(-total // tile))](
        qkv, q, keys, values, positions, slots,
        q if cos is None else cos, q if sin is None else sin,
        q if q_norm is None else q_norm, q if k_norm is None else k_norm, eps, offset,
        qkv.stride(0), keys.stride(0), values.stride(0), 0 if cos is None else cos.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAD=power_of_two(size // 2), TILE=tile,
        ROTATE=cos is not None, NORM=q_norm is not None, OFFSET=bool(offset),
        ROUND=cos is not None and cos.dtype == qkv.dtype,
        num_warps=1 if tile == 4 else 4, **ahead(qkv.device),
    )  # fmt: skip
    return q


rms_norm = Kernel("rms_norm", _device_norm, _plain_norm)
silu_mul = Kernel("silu_mul", _device_gated, _plain_gated)
write_and_rotate = Kernel("write_and_rotate", _device_rotate, _plain_rotate)
