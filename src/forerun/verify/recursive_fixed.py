"""Recursive rejection of fixed children: the draft law is a point mass, so x is accepted with probability p(x)
and a refusal leaves p without x.

Nothing here depends on why a token was proposed, so any tree will do, also a pruned or reranked one: given the
tree, every token comes out with its probability under p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import LawTable, drop_elder, elder_draws, entries, rows, where
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass
from forerun.verify.rejection import Trial, reject_down
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []
    node = 0
    while True:
        remainder, scale = p[node].copy(), 1.0  # p is remainder / scale: dividing is put off
        moved = False
        for k, drawn in enumerate(tree.children[node]):
            x = tree.tokens[drawn.child]
            if noise.accept(node, k) * scale < float(remainder[x]):  # u < p(x)
                node, moved = drawn.child, True
                path.append(node)
                break
            scale -= float(remainder[x])
            remainder[x] = 0
        if not moved:
            if mass(remainder) == 0:  # only rounding leads here
                remainder = p[node]
            return PlainVerdict(tuple(path), draw(remainder, noise.final(len(path))))


@dataclass
class _FixedRemainder:
    """p without the refused children of the node; `scale` is what it holds. The row is written at the end."""

    tree: DraftTree
    p: Tensor | LawTable  # [B, N, V]
    scale: Tensor  # [B] float64

    def _left(self, trial: Trial) -> Tensor:
        """p(x), or 0 where an elder sibling was the same token."""
        tokens, refused = elder_draws(self.tree, self._everyone(), trial.node, trial.rank)
        again = (refused & (tokens == trial.token[:, None])).any(-1)
        return entries(self.p, trial.node, trial.token).masked_fill(again, 0.0)

    def _everyone(self) -> Tensor:
        return torch.arange(self.tree.batch, device=self.p.device)

    def accepts(self, trial: Trial) -> Tensor:
        return trial.u * self.scale < self._left(trial)

    def refuse(self, mask: Tensor, trial: Trial) -> None:
        self.scale = torch.where(mask, self.scale - self._left(trial), self.scale)

    def move(self, mask: Tensor) -> None:
        self.scale = torch.where(mask, 1.0, self.scale)

    def weights(self, node: Tensor, rank: Tensor) -> Tensor:
        left = rows(self.p, node)
        drop_elder(left, self.tree, self._everyone(), node, rank)
        # Only rounding empties a remainder, and then `scale` is as small as rounding: p itself takes its place.
        small = where(self.scale < 1e-4)
        empty = small[exact.mass(left[small]) <= 0]
        left.index_copy_(0, empty, rows(self.p, node[empty], empty))
        return left


def verify(tree: DraftTree, p: Tensor | LawTable, noise: BatchNoise) -> Verdict:
    one = torch.ones(tree.batch, dtype=torch.float64, device=p.device)
    return reject_down(tree, _FixedRemainder(tree, p, one), noise)


RULE = VerificationRule(
    name="recursive_fixed",
    summary="accept each candidate with its probability under what is left of p",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=verify,
    looks_along_the_path=True,
)
