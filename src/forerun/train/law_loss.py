"""How far a drafter's laws are from the target's, summed over many places.

    Σ_w Σ_k weight[w, k] · KL(p_w ‖ q_wk)        p_w = softmax(target's head · state_w)
                                                 q_wk = softmax(drafter's head · x_wk)

Drafts are accepted by how close q is to p, so the whole law is learned, not only the token that was written. Both are
laws over the draft vocabulary: that of the target is its own, given that the token is in there.

Logits of a batch would be tens of gigabytes. So they are made for some places at a time, and since the gradient
∂/∂logits = weight · (q − p) is known as soon as they are there, it is taken back through the head at once: nothing of
the size of a vocabulary is kept, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.laws_apart import laws_apart

ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits at a time."""


@dataclass(frozen=True)
class Laws:
    """The target's laws at W places."""

    states: Tensor  # [W, H] what its head reads there
    head: Tensor  # [V', H] rows of it, for the tokens that can be drafted
    labels: Tensor | None = None  # [W] the tokens written there, by their place in that vocabulary; -1 for others
    soft: float = 1.0
    """How much the law counts; the rest goes to the token that was written, where there are labels."""


@dataclass(frozen=True)
class Distance:
    total: Tensor
    """The sum over places and steps, which can be differentiated."""
    agreed: Tensor
    """[K] at how many places both laws have the same likeliest token."""
    overlap: Tensor
    """[K] Σ min(p, q): how many drafts sampled from q would be accepted."""


def distance(x: Tensor, head: Tensor, laws: Laws, weights: Tensor) -> Distance:
    """x [W, K, H], what the drafter's `head` [V', H] reads; weights [W, K]."""
    kind = laws.head.dtype
    total, figures = _Sum.apply(  # type: ignore[no-untyped-call]
        x.to(kind), head.to(kind), laws.states.to(kind), laws.head, weights.float(), laws.labels, laws.soft
    )
    return Distance(total, figures[1], figures[2])


@torch.no_grad()
def overlaps(x: Tensor, head: Tensor, laws: Laws, ids: Tensor | None = None) -> Tensor:
    """x [W, H] → [W], Σ min(p, q) at each place: how likely a draft sampled from q is accepted there. `ids` are the
    tokens that rows of `head` stand for, where these are not those of the laws' own."""
    kind = laws.head.dtype
    at_once = max(1, ELEMENTS.get(x.device.type, ELEMENTS["cuda"]) // head.shape[0])
    parts = []
    with torch.autocast(x.device.type, enabled=False):
        both = (torch.split(rows.to(kind), at_once) for rows in (x, laws.states))
        for own, taught in zip(*both, strict=True):
            p, q = (torch.softmax(_logits(*each), -1) for each in ((taught, laws.head), (own, head.to(kind))))
            parts.append(torch.minimum(p if ids is None else p[:, ids], q).sum(-1))
    return torch.cat(parts)


def _logits(x: Tensor, head: Tensor) -> Tensor:
    """In float32 always: those of bfloat16 have steps of 1/8 at their usual size."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, head.T, out_dtype=torch.float32)
    return (x @ head.T).float()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        states: Tensor,
        target_head: Tensor,
        weights: Tensor,
        labels: Tensor | None,
        soft: float,
    ) -> tuple[Tensor, Tensor]:
        width = x.shape[1] * head.shape[0]
        at_once = max(1, ELEMENTS.get(x.device.type, ELEMENTS["cuda"]) // width)
        figures = torch.zeros(3, x.shape[1], device=x.device)
        of_x = torch.empty_like(x)
        of_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.autocast(x.device.type, enabled=False):  # number formats are chosen here
            for start in range(0, x.shape[0], at_once):
                part = slice(start, start + at_once)
                own = None if labels is None else labels[part]
                scores = _logits(x[part].flatten(0, 1), head).view(-1, x.shape[1], head.shape[0])  # [w, K, V']
                target = _logits(states[part], target_head)
                sums, gradient = laws_apart(scores, target, weights[part], own, soft, x.dtype)
                figures += sums
                of_x[part] = gradient @ head
                if of_head is not None:
                    of_head += (gradient.flatten(0, 1).T @ x[part].flatten(0, 1)).float()
        ctx.save_for_backward(of_x, of_head)
        ctx.mark_non_differentiable(figures)
        return figures[0].sum(), figures

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, of_figures: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_head = ctx.saved_tensors
        scaled = None if of_head is None else (of_head * of_total).to(of_x.dtype)
        return (of_x * of_total.to(of_x.dtype), scaled, None, None, None, None, None)
