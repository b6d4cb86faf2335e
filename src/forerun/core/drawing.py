"""How the children of a node are drawn: what a rule may assume about them, and the functions that make it true."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from forerun.core import exact


class Drawing(Enum):
    """How the children of a node came about. The verification rule has to match it."""

    FIXED = "fixed"
    """A deterministic function of the context: top-k of a head, an n-gram, a retrieved text."""
    IID = "iid"
    """Independent samples of one law q per node."""
    INDEPENDENT = "independent"
    """Independent samples, each from a law of its own (several draft models)."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Samples of one law q per node, without replacement, in the order drawn."""

    @property
    def sampled(self) -> bool:
        return self is not Drawing.FIXED


ABSENT = -1
"""Where a law has fewer tokens than children are wanted."""


def top_children(q: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens of each row: q [..., V] → [..., count]. A fixed drawing; ties in any order."""
    return _largest(q, count)


def iid_children(q: Tensor, u: Tensor) -> Tensor:
    """Independent samples: q [..., V] and uniforms [..., K] → [..., K]. Equal tokens may come twice."""
    count = u.shape[-1]
    if count == 0:
        return torch.zeros_like(u, dtype=torch.int64)
    return torch.stack([exact.draw(q, u[..., k]) for k in range(count)], -1)


def race_children(q: Tensor, race: Tensor, count: int) -> Tensor:
    """The first `count` arrivals of a race in which token x takes race(x)/q(x): q and race [..., V] → [..., count].

    With exponentials of the drafter's own these are samples without replacement, in the order drawn (the first is
    drawn from q, the next from q without the first, …). With the exponentials the target will use at that position
    they are the candidates of Gumbel coupling, the largest of log q + g.
    """
    return _largest(q / race.to(q.dtype), count)


def _largest(scores: Tensor, count: int) -> Tensor:
    kept = min(count, scores.shape[-1])
    values, tokens = scores.topk(kept, -1)
    tokens = tokens.masked_fill(values <= 0, ABSENT)
    if kept < count:
        tokens = torch.nn.functional.pad(tokens, (0, count - kept), value=ABSENT)
    return tokens
