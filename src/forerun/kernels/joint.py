"""Attention of rows over a text that is common to them and over a few keys that each has of its own, with its gradient.

The text's part is what flash attention does, and it says how much all its weights were together. So the two parts can
be joined afterwards, and no square of scores is ever written.

q [B, R, heads, D]; text_k, text_v [B, R, kv, D], row i sees those up to i; own_k, own_v [B, R, k, kv, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.kernels.kernel import power_of_two

ROWS, WARPS = 2, 1
"""Of a program: sums within one warp need no memory that several share."""


def supports(q: Tensor) -> bool:
    """Whether the kernels take such rows."""
    size = q.shape[-1]
    return q.is_cuda and q.dtype in {torch.bfloat16, torch.float16} and size == power_of_two(size) and size >= 16


def attend(q: Tensor, text_k: Tensor, text_v: Tensor, own_k: Tensor, own_v: Tensor, scale: float) -> Tensor:
    """[B, R, heads, D]"""
    found: Tensor = _Joint.apply(q, text_k, text_v, own_k, own_v, scale)  # type: ignore[no-untyped-call]
    return found


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, text_k: Tensor, text_v: Tensor, own_k: Tensor, own_v: Tensor, scale: float
    ) -> Tensor:
        q, own_k, own_v = q.contiguous(), own_k.contiguous(), own_v.contiguous()
        text, text_log, chance = in_text(q, text_k, text_v, scale)
        out, log = join(q, own_k, own_v, text, text_log, scale)
        ctx.save_for_backward(q, text_k, text_v, own_k, own_v, out, log, *chance)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        q, text_k, text_v, own_k, own_v, out, log, *chance = ctx.saved_tensors
        of_out = of_out.contiguous()
        of_q, of_text_k, of_text_v = of_text(of_out, q, text_k, text_v, out, log, chance, ctx.scale)
        of_q, of_k, of_v = part(q, own_k, own_v, out, log, of_out, of_q.contiguous(), ctx.scale)
        return of_q, of_text_k, of_text_v, of_k, of_v, None


def join(
    q: Tensor, own_k: Tensor, own_v: Tensor, text: Tensor, text_log: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What is found in both, and the logarithm of all weights [B, heads, R], from the same of the text."""
    from forerun.kernels.gpu import joint as gpu

    out, log = torch.empty_like(q), torch.empty_like(text_log)
    gpu.join[_grid(q, own_k)](
        q, own_k, own_v, text, text_log, out, log, q.shape[0] * q.shape[1], q.shape[1], scale, **_sizes(q, own_k)
    )
    return out, log


def part(
    q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, log: Tensor, of_out: Tensor, of_q: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, to which `of_q` is what the text gives, and of the own keys and values."""
    from forerun.kernels.gpu import joint as gpu

    of_k, of_v = torch.empty_like(own_k), torch.empty_like(own_v)
    gpu.part[_grid(q, own_k)](
        q, own_k, own_v, out, log, of_out, of_q, of_k, of_v, q.shape[0] * q.shape[1], q.shape[1], scale,
        **_sizes(q, own_k),
    )  # fmt: skip
    return of_q, of_k, of_v


def _grid(q: Tensor, own_k: Tensor) -> tuple[int, int]:
    return -(-q.shape[0] * q.shape[1] // ROWS), own_k.shape[3]


def _sizes(q: Tensor, own_k: Tensor) -> dict[str, int]:
    heads, kv = q.shape[2], own_k.shape[3]
    group = heads // kv
    return {
        "HEADS": heads, "GROUP": group, "PAD": power_of_two(group), "SIZE": q.shape[3], "STEPS": own_k.shape[2],
        "ROWS": ROWS, "num_warps": WARPS,
    }  # fmt: skip


def in_text(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What rows find in the text [B, R, heads, D], the logarithm of the sum of their weights [B, heads, R], and what
    flash attention's gradient asks for besides."""
    if not q.is_cuda:
        weights, log = _weights(q, k, scale)
        return torch.einsum("bhij,bjhd->bihd", weights, _spread(v, q)).to(q.dtype).contiguous(), log, []
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    found = flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True, False, scale=scale)
    return found[0].transpose(1, 2).contiguous(), found[1].contiguous(), [found[6], found[7]]


def of_text(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor, chance: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v as far as the text goes. With what was found in all and the weight of all, flash
    attention's own gradient is that: its weights are then the shares that the text has of the whole."""
    if not q.is_cuda:
        weights, _ = _weights(q, k, scale, log)
        given, spread_k, spread_v = of_out.float(), _spread(k, q), _spread(v, q)
        mean = (given * out.float()).sum(-1).transpose(1, 2)[..., None]
        of_scores = weights * (torch.einsum("bihd,bjhd->bhij", given, spread_v) - mean) * scale
        of_q = torch.einsum("bhij,bjhd->bihd", of_scores, spread_k)
        of_k = torch.einsum("bhij,bihd->bjhd", of_scores, q.float())
        of_v = torch.einsum("bhij,bihd->bjhd", weights, given)
        return of_q.to(q.dtype), _gathered(of_k, k), _gathered(of_v, v)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    parts = (part.transpose(1, 2) for part in (of_out, q, k, v, out))
    rows = q.shape[1]
    grads = flash(*parts, log, None, None, rows, rows, 0.0, True, *chance, scale=scale)
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _weights(q: Tensor, k: Tensor, scale: float, log: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[B, heads, R, R] as shares of the whole whose logarithm is given, or of the text, and that logarithm."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), _spread(k, q)) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    log = torch.logsumexp(scores, -1) if log is None else log
    return torch.exp(scores - log[..., None]), log


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Heads of keys, once for each query that reads them."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], 2)


def _gathered(x: Tensor, like: Tensor) -> Tensor:
    count, rows, kv, size = like.shape
    return x.reshape(count, rows, kv, -1, size).sum(3).to(like.dtype)
