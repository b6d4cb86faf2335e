"""How far two laws are apart, for many at once, with the gradient: what `train/law_loss.py` sums."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.kernel import Kernel, power_of_two

TILE = 2048


def _plain(
    scores: Tensor, target: Tensor, weights: Tensor, labels: Tensor | None, soft: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Logits of the drafter [w, K, V] and of the target [w, V] → distance, agreement and overlap [3, K], summed with
    weights [w, K], and the gradient of the drafter's logits [w, K, V] in `dtype`. Of the target's law `soft` counts
    where there are labels [w], and the rest is the label's; it is -1 for a token that cannot be drafted."""
    p = torch.softmax(target, -1)  # [w, V]
    aim = p
    if labels is not None:
        hard = torch.zeros_like(p).scatter(1, labels.clamp_min(0)[:, None], (labels >= 0).float()[:, None])
        aim = soft * p + (1 - soft) * hard
    mass = aim.sum(-1, keepdim=True)  # less than 1 where the token cannot be drafted
    log_q = torch.log_softmax(scores, -1)
    q = log_q.exp()
    apart = torch.xlogy(aim, aim).sum(-1, keepdim=True) - (aim[:, None] * log_q).sum(-1)  # [w, K]
    agreed = (scores.argmax(-1) == p.argmax(-1, keepdim=True)).float()
    overlap = torch.minimum(p[:, None], q).sum(-1)
    counted = (weights > 0).float()
    figures = torch.stack([(weights * apart).sum(0), (counted * agreed).sum(0), (counted * overlap).sum(0)])
    gradient = weights[..., None] * (mass[:, None] * q - aim[:, None])
    return figures, gradient.to(dtype)


def _device(
    scores: Tensor, target: Tensor, weights: Tensor, labels: Tensor | None, soft: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from forerun.kernels.gpu import laws_apart as gpu

    places, steps, size = scores.shape
    assert scores.dtype == target.dtype == weights.dtype == torch.float32
    assert scores.is_contiguous()
    assert target.is_contiguous()
    weights = weights.contiguous()
    tops, logs = (torch.empty(places, device=scores.device) for _ in range(2))
    tokens = torch.empty(places, dtype=torch.int32, device=scores.device)
    figures = torch.empty(3, places, steps, device=scores.device)
    gradient = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    if gradient.numel():
        tile = min(TILE, power_of_two(size))
        warps = max(1, tile // 256)  # eight numbers a thread: with more, fewer programs fit
        gpu.normal[(places,)](target, tops, logs, tokens, size, TILE=tile, num_warps=warps)
        gpu.laws_apart[(places * steps,)](
            scores, target, weights, tokens if labels is None else labels.contiguous(), tops, logs, tokens,
            figures, gradient, float(soft), size, places * steps, steps,
            TILE=tile, HARD=labels is not None, num_warps=warps,
        )  # fmt: skip
    return figures.sum(1), gradient


laws_apart = Kernel("laws_apart", _device, _plain)
