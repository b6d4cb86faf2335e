"""How sure a drafter is of its candidates: the numbers that a dynamic tree grows and is pruned by, and traces tell.

A candidate's score is q, or q/E under Gumbel coupling, where the target takes the largest p/E with the same E. The
closer p is to q, the surer the largest q/E: a candidate's share of all (q/E)^(1/τ), the softmax of (log q + g)/τ,
stands for its chance. At temperature 0 the target takes the likeliest, and a drafter that knows p well is surer of it
than q says: a share of q^(1/τ), with a τ of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.law import LawSettings
from forerun.core.noise import Purpose, StepNoise, row_key, uniform
from forerun.core.params import SamplingParams
from forerun.core.shape import TreeShape
from forerun.core.tree import LogValues

LEAST_BIAS = -1e30
"""Stands for a bias of -inf, which could leave a small draft vocabulary without any token. No softmax tells the two
apart while a token is left, and where none is, there is still a law to draw from: the target refuses what was drawn."""


@dataclass(frozen=True)
class Taus:
    """Below 1 confidences are sharper, so that dynamic trees get deeper, above 1 flatter. Who draws without coupling
    has no use for either."""

    coupled: float = 1.0
    greedy: float = 1.0

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> Taus:
        """As a drafter's folder has them."""
        return cls(float(calibration.get("tau", 1.0)), float(calibration.get("greedy_tau", 1.0)))


AS_IT_IS = Taus()


def draft_settings(
    params: Sequence[SamplingParams], device: torch.device, *, ranked: bool, tau: float = 1.0
) -> LawSettings:
    """Of the laws that a draft thinks by: the requests' own, but `ranked` at temperature 0 all tokens in their order,
    by q^(1/tau), since a one-hot has a single candidate."""
    if ranked:
        params = [
            replace(each, temperature=tau, top_k=0, top_p=1.0, min_p=0.0) if each.greedy else each for each in params
        ]
    settings = LawSettings.of(params, device)
    return replace(settings, bias_values=settings.bias_values.clamp_min(LEAST_BIAS))


@dataclass(frozen=True)
class Scores:
    """Of all candidates of R rows."""

    values: Tensor  # [R, C]
    coupled: Tensor | None  # the rows where they are q/E
    tau: float

    @classmethod
    def of(cls, q: Tensor, race: Tensor | None, coupled: Tensor | None, tau: float) -> Scores:
        """From laws q [R, C], and E [R', C] for the coupled rows."""
        if race is None or coupled is None:
            return cls(q, None, tau)
        values = q.clone()
        values[coupled] = values[coupled] / race.to(q.dtype)
        return cls(values, coupled, tau)

    def log_shares(self, columns: Tensor) -> Tensor:
        """[R, K] log confidences of columns [R, K]; -inf for a column that is `ABSENT`."""
        found = log_shares(self.values, columns)
        if self.coupled is not None and self.tau != 1:
            found[self.coupled] = log_shares(self.values[self.coupled], columns[self.coupled], self.tau)
        return found


def log_shares(scores: Tensor, columns: Tensor, tau: float = 1.0) -> Tensor:
    """Scores [R, C] and columns [R, K] → [R, K] log confidences, -inf for a column that is `ABSENT`."""
    some = columns.clamp_min(0)
    if tau == 1:
        shares = (scores.gather(1, some) / scores.sum(1, keepdim=True)).log()
    else:  # in logs: powers of q/E overflow
        logs = scores.log() / tau
        shares = logs.gather(1, some) - logs.logsumexp(1, keepdim=True)
    return torch.where(columns >= 0, shares, -torch.inf)


def token_race(noise: StepNoise, depth: int, tokens: Tensor) -> Tensor:
    """[B, C] the exponentials of `noise.race` for tokens [C], but for their last bits: these only rank guesses, and
    cost a fifth."""
    keys = row_key(noise.seeds, noise.starts + depth, Purpose.TOKEN)
    return (uniform(keys[:, None], tokens) + 2.0**-53).log_().neg_()


def add_along_paths(shape: TreeShape, shares: Tensor) -> list[list[float]]:
    """The log values of all nodes of trees of one shape, from the log shares [B, N - 1] of those below the root."""
    values = torch.zeros(shares.shape[0], shape.size, dtype=torch.float64)
    for node, parent in enumerate(shape.parents[1:], start=1):
        values[:, node] = values[:, parent] + shares[:, node - 1]
    listed: list[list[float]] = values.tolist()
    return listed


def logs_of(values: Sequence[Sequence[float]]) -> LogValues:
    """What a tree tells of its nodes' values where these are chances, for each tree and each node."""
    return lambda: [[math.log(value) if value > 0 else -math.inf for value in own] for own in values]
