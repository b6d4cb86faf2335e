"""The walk that all top-down rejection rules share: try the draws at a node one after the other, move to the
first that is accepted, and where none is left draw from what remains of p.

What a rule adds is a `Remainder`: when a draw is accepted, and what a refusal leaves of p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import Walk, bare, drop_elder, entries, rows, where
from forerun.verify.rule import BatchNoise


@dataclass(frozen=True)
class Trial:
    """One draw of every sequence that is `active`: the `rank`-th at `node`. All [B]."""

    active: Tensor
    node: Tensor
    rank: Tensor
    child: Tensor
    token: Tensor
    q_row: Tensor
    u: Tensor


class Remainder(Protocol):
    """What is left of p at each sequence's node."""

    def accepts(self, trial: Trial) -> Tensor:
        """[B] bool."""

    def refuse(self, mask: Tensor, trial: Trial) -> None:
        """The sequences of `mask` refused the draw."""

    def move(self, mask: Tensor) -> None:
        """The sequences of `mask` went to a child, where p is whole again."""

    def weights(self, node: Tensor, rank: Tensor) -> Tensor:
        """[B, V] what remains of p, up to a factor, after `rank` draws were refused at `node`."""


def reject_down(tree: DraftTree, remainder: Remainder, noise: BatchNoise) -> Verdict:
    walk = Walk.start(tree)
    rank = torch.zeros_like(walk.node)
    row_of = tree.q_rows if tree.q_rows is not None else tree.children  # fixed trees have no q, and nobody asks
    for _ in range(0 if bare(tree) else min(tree.max_draws, tree.max_depth * tree.width)):
        at = rank.clamp_max(tree.width - 1)[:, None]
        child = rows(tree.children, walk.node).gather(1, at).squeeze(1)
        walk.active = walk.active & (rank < tree.width) & (child >= 0)
        if not walk.active.any():
            break
        child = child.clamp_min(0)
        token = tree.tokens.gather(1, child[:, None]).squeeze(1)
        q_row = rows(row_of, walk.node).gather(1, at).squeeze(1)
        trial = Trial(walk.active, walk.node, rank, child, token, q_row, noise.accept(walk.node, rank))
        accepted = walk.active & remainder.accepts(trial)
        refused = walk.active & ~accepted
        remainder.refuse(refused, trial)
        remainder.move(accepted)
        walk.move(accepted, child)
        rank = torch.where(accepted, 0, rank + refused)
    weights = remainder.weights(walk.node, rank)
    return walk.verdict(exact.draw(weights, noise.final(walk.lengths)))


@dataclass
class SampledRemainder:
    """What is left of p after refusing draws from laws q: p ← norm([p − q]+), round after round.

    Kept without dividing: `row` is the remainder times its mass `scale`. It is only written once something
    is refused; until then (`whole`) the remainder is p itself. With `exhaust`, draws are without replacement:
    a refused token leaves q, and `q_mass` is what q still holds.
    """

    tree: DraftTree
    p: Tensor  # [B, N, V]
    exhaust: bool
    row: Tensor  # [B, V]
    scale: Tensor  # [B] float64
    q_mass: Tensor  # [B] float64
    whole: Tensor  # [B] bool

    @classmethod
    def start(cls, tree: DraftTree, p: Tensor, *, exhaust: bool) -> SampledRemainder:
        one = torch.ones(tree.batch, dtype=torch.float64, device=p.device)
        return cls(tree, p, exhaust, p.new_zeros(p.shape[0], p.shape[2]), one, one.clone(), one > 0)

    def _q(self) -> Tensor:
        assert self.tree.q is not None, "only sampled trees have q"
        return self.tree.q

    def accepts(self, trial: Trial) -> Tensor:
        """u < p(x) / q(x), with p = row / scale and q = q / q_mass."""
        left = self.row.gather(1, trial.token[:, None]).squeeze(1).to(torch.float64)
        p = torch.where(self.whole, entries(self.p, trial.node, trial.token), left)
        q = entries(self._q(), trial.q_row, trial.token)
        return trial.u * (q * self.scale) < p * self.q_mass

    def refuse(self, mask: Tensor, trial: Trial) -> None:
        chosen = where(mask)
        if not chosen.numel():
            return
        self._write_out(mask & self.whole, trial.node)
        before = self.row.index_select(0, chosen)
        token = trial.token[chosen, None]
        scale, q_mass = self.scale[chosen], self.q_mass[chosen]
        q = rows(self._q(), trial.q_row[chosen], chosen)
        if self.exhaust:
            drop_elder(q, self.tree, chosen, trial.node[chosen], trial.rank[chosen])
            left_of_q, fresh = q_mass.clone(), where(self.whole[chosen])
            left_of_q[fresh] = exact.mass(q[fresh])
            left_of_q -= exact.fixed(q.gather(1, token).squeeze(1)).to(torch.float64) / exact.UNIT
            self.q_mass[chosen] = left_of_q
        share = torch.where(q_mass > 0, scale / q_mass, 0.0).to(before.dtype)[:, None]
        after = torch.sub(before, q.mul_(share)).clamp_min_(0)
        after.scatter_(1, token, 0.0)  # refused means p(x) < q(x); rounding must not bring it back
        left = exact.mass(after)
        empty = left <= 0  # only rounding leads here: then p itself is the remainder
        if empty.any():
            left = torch.where(empty, scale, left)
            after = torch.where(empty[:, None], before, after)
        self.scale[chosen] = left
        self.row.index_copy_(0, chosen, after)
        self.whole = self.whole & ~mask

    def _write_out(self, mask: Tensor, node: Tensor) -> None:
        """The sequences of `mask` need p itself in `row`."""
        chosen = where(mask)
        self.row.index_copy_(0, chosen, rows(self.p, node[chosen], chosen))

    def move(self, mask: Tensor) -> None:
        self.whole = self.whole | mask
        self.scale = torch.where(mask, 1.0, self.scale)
        self.q_mass = torch.where(mask, 1.0, self.q_mass)

    def weights(self, node: Tensor, rank: Tensor) -> Tensor:
        self._write_out(self.whole, node)
        return self.row
