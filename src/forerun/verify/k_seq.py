"""K-SEQ (SpecTr, Sun et al. 2023): K independent draws of one q, all judged by the same bar p/(ρq), with ρ just
high enough that what was accepted can be made up to p.

With β = Σ min(q, p/ρ), a draw is accepted with probability β, so one of K is with c = 1 − (1−β)^K, and then it
follows min(q, p/ρ)/β. The rest, p − min(q, p/ρ)·c/β, is nowhere negative as long as c ≤ ρβ. Any such ρ keeps
the law; the smallest accepts most. It is found by halving [1, K], so the last upper end always serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import bare, entries, rows, where
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass, positive
from forerun.verify.rejection import Trial, reject_down
from forerun.verify.rule import BatchNoise, VerificationRule

_HALVINGS = 12
"""ρ within K/4096 of the smallest: each halving reads both laws once, and more of them gain nothing to speak of."""


def _bar(p: Row, q: Row, draws: int) -> float:
    """1/ρ for the smallest ρ ≥ 1 with 1 − (1−β)^K ≤ ρβ."""

    def serves(rho: float) -> bool:
        beta = mass(np.minimum(q, p * p.dtype.type(1 / rho)))
        return 1 - _power(1 - beta, draws) <= rho * beta

    low, high = 1.0, float(draws)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return 1 / high


def _power(base: float, exponent: int) -> float:
    """By multiplication alone: pow() does not round alike everywhere."""
    result = 1.0
    for _ in range(exponent):
        result *= base
    return result


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []
    node = 0
    while tree.children[node]:
        draws = tree.children[node]
        q = tree.law(draws[0])
        bar = _bar(p[node], q, len(draws))  # 1/ρ
        moved = False
        for k, drawn in enumerate(draws):
            x = tree.tokens[drawn.child]
            if noise.accept(node, k) * float(q[x]) < float(p[node][x]) * bar:  # u < p(x) / (ρ q(x))
                node, moved = drawn.child, True
                path.append(node)
                break
        if not moved:
            return PlainVerdict(tuple(path), draw(_residual(p[node], q, bar, len(draws)), noise.final(len(path))))
    return PlainVerdict(tuple(path), draw(p[node], noise.final(len(path))))


def _residual(p: Row, q: Row, bar: float, draws: int) -> Row:
    accepted = np.minimum(q, p * p.dtype.type(bar))
    beta = mass(accepted)
    if beta == 0:
        return p
    factor = (1 - _power(1 - beta, draws)) / beta
    residual = positive(p - accepted * p.dtype.type(factor))
    return residual if mass(residual) > 0 else p


@dataclass
class _KSeqRemainder:
    """`bar` is 1/ρ at the node where a sequence stands, found when its first draw there is tried."""

    tree: DraftTree
    p: Tensor  # [B, N, V]
    bar: Tensor  # [B] float64

    def accepts(self, trial: Trial) -> Tensor:
        arrived = where(trial.active & (trial.rank == 0))
        if arrived.numel():
            p, q = self._laws(arrived, trial.node)
            self.bar[arrived] = _bars(p, q, self._draws(trial.node)[arrived], self.tree.width)
        q_x = entries(self._q(), trial.q_row, trial.token)
        return trial.u * q_x < entries(self.p, trial.node, trial.token) * self.bar

    def refuse(self, mask: Tensor, trial: Trial) -> None:
        """Refusals change nothing: every draw faces the same bar."""

    def move(self, mask: Tensor) -> None:
        """The bar is found on arrival."""

    def weights(self, node: Tensor, rank: Tensor) -> Tensor:
        weights = rows(self.p, node)
        if bare(self.tree):
            return weights
        refused = where(rank > 0)
        p, q = self._laws(refused, node)
        accepted = torch.minimum(q, p * self.bar[refused].to(p.dtype)[:, None])
        beta = exact.mass(accepted)
        power = _powers(1 - beta, self._draws(node)[refused], self.tree.width)
        factor = torch.where(beta > 0, (1 - power) / beta, 0.0)
        residual = (p - accepted * factor.to(p.dtype)[:, None]).clamp_min_(0)
        some = exact.mass(residual) > 0  # else only by rounding: then p itself stays
        weights.index_copy_(0, refused[some], residual[some])
        return weights

    def _q(self) -> Tensor:
        assert self.tree.q is not None, "only sampled trees have q"
        return self.tree.q

    def _laws(self, chosen: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        assert self.tree.q_rows is not None, "only sampled trees have q"
        at = node[chosen]
        return rows(self.p, at, chosen), rows(self._q(), self.tree.q_rows[chosen, at, 0], chosen)

    def _draws(self, node: Tensor) -> Tensor:
        return (rows(self.tree.children, node) >= 0).sum(-1)


def _bars(p: Tensor, q: Tensor, draws: Tensor, most: int) -> Tensor:
    low = torch.ones_like(draws, dtype=torch.float64)
    high = draws.to(torch.float64).clamp_min(1.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beta = exact.mass(torch.minimum(q, p * (1 / middle).to(p.dtype)[:, None]))
        serves = 1 - _powers(1 - beta, draws, most) <= middle * beta
        low, high = torch.where(serves, low, middle), torch.where(serves, middle, high)
    return 1 / high


def _powers(base: Tensor, exponents: Tensor, most: int) -> Tensor:
    result = torch.ones_like(base)
    for k in range(most):
        result = torch.where(exponents > k, result * base, result)
    return result


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    one = torch.ones(tree.batch, dtype=torch.float64, device=p.device)
    return reject_down(tree, _KSeqRemainder(tree, p, one), noise)


RULE = VerificationRule(
    name="k_seq",
    summary="judge K draws of one law by one common bar",
    drawings=frozenset({Drawing.IID}),
    reference=reference,
    batched=verify,
)
