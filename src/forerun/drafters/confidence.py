"""How sure a drafter is of its candidates: the numbers that a dynamic tree grows and is pruned by.

A candidate's score is q, or q/E under Gumbel coupling, where the target takes the largest p/E with the same E. The
closer p is to q, the surer the largest q/E: a candidate's share of all (q/E)^(1/τ), the softmax of (log q + g)/τ,
stands for its chance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_shares(scores: Tensor, columns: Tensor, tau: float = 1.0) -> Tensor:
    """Scores [R, C] and columns [R, K] → [R, K] log confidences, -inf for a column that is `ABSENT`."""
    some = columns.clamp_min(0)
    if tau == 1:
        shares = (scores.gather(1, some) / scores.sum(1, keepdim=True)).log()
    else:  # in logs: powers of q/E overflow
        logs = scores.log() / tau
        shares = logs.gather(1, some) - logs.logsumexp(1, keepdim=True)
    return torch.where(columns >= 0, shares, -torch.inf)
