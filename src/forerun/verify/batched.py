"""The batched side of verification: tensors, no loop over sequences or vocabulary.

Sequences advance at their own pace through loops over depth or over draws. Each round asks which sequences have
something to do, works on their rows only, and ends the loop when there are none. On CUDA the question is a short wait
for the device; not asking, and working on all rows under masks instead, was measured to cost far more (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict


class LawTable(Protocol):
    """p [B, N, V] whose rows are made when they are asked for. Most rules look at the nodes of one path only."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, sequences: Tensor, nodes: Tensor) -> Tensor:
        """p[b, n] for b in `sequences` [C] and n in `nodes` [C] → [C, V]; a copy."""
        ...

    def entries(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """p[b, n, x] for every sequence b; nodes and tokens [B] or [B, K]."""
        ...


def rows(table: Tensor | LawTable, index: Tensor, sequences: Tensor | None = None) -> Tensor:
    """table [B, N, ...] at one index for each of `sequences` [C] (all of them by default) → [C, ...]; a copy.

    Selecting from a flat view copies whole rows: less than half the time of indexing with two tensors (docs/log.md).
    """
    if sequences is None:
        sequences = torch.arange(table.shape[0], device=table.device)
    if not isinstance(table, Tensor):
        return table.rows(sequences, index)
    return table.flatten(0, 1).index_select(0, sequences * table.shape[1] + index)


def entries(p: Tensor | LawTable, index: Tensor, tokens: Tensor) -> Tensor:
    """Single probabilities p[b, index, token] in float64; index and tokens [B] or [B, K]."""
    if not isinstance(p, Tensor):
        return p.entries(index, tokens).to(torch.float64)
    batch, size, vocabulary = p.shape
    start = torch.arange(batch, device=p.device) * (size * vocabulary)
    flat = start.view(-1, *[1] * (index.dim() - 1)) + index * vocabulary + tokens
    return p.reshape(-1).take(flat).to(torch.float64)


def bare(tree: DraftTree) -> bool:
    """Whether nothing can have been drafted, as far as shapes tell: plain decoding."""
    return tree.width == 0 or (tree.q is not None and tree.q.shape[1] == 0)


def where(mask: Tensor) -> Tensor:
    """The sequences of `mask` [B], as indices."""
    return mask.nonzero().squeeze(1)


def elder_draws(tree: DraftTree, sequences: Tensor, nodes: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [C, K] of the draws at `nodes` [C], and which of them come before `rank` [C]."""
    siblings = tree.children[sequences, nodes]
    order = torch.arange(siblings.shape[1], device=siblings.device)
    tokens = tree.tokens[sequences].gather(1, siblings.clamp_min(0))
    return tokens, (siblings >= 0) & (order < rank[:, None])


def drop_elder(law: Tensor, tree: DraftTree, sequences: Tensor, nodes: Tensor, rank: Tensor) -> None:
    """law [C, V] ← 0 at the tokens of the draws before `rank` at `nodes`, in place; all others [C]."""
    tokens, elder = elder_draws(tree, sequences, nodes, rank)
    # The smallest of all that is written to a token wins: padding names tokens too, and must not bring one back.
    law.scatter_reduce_(1, tokens, torch.zeros_like(tokens, dtype=law.dtype).masked_fill(~elder, torch.inf), "amin")


@dataclass
class Walk:
    """Where each sequence stands on its way from the root down."""

    node: Tensor  # [B]
    active: Tensor  # [B] bool
    nodes: Tensor  # [B, D] accepted so far, padded with -1
    lengths: Tensor  # [B]

    @classmethod
    def start(cls, tree: DraftTree) -> Walk:
        zero = torch.zeros_like(tree.tokens[:, 0])
        nodes = tree.tokens.new_full((tree.batch, tree.max_depth), -1)
        return cls(zero, torch.ones_like(zero, dtype=torch.bool), nodes, zero.clone())

    def move(self, mask: Tensor, child: Tensor) -> None:
        """The sequences of `mask` [B] accept `child` [B]."""
        if self.nodes.shape[1] == 0:
            return
        slot = self.lengths.clamp_max(self.nodes.shape[1] - 1)[:, None]
        kept = torch.where(mask[:, None], child[:, None], self.nodes.gather(1, slot))
        self.nodes.scatter_(1, slot, kept)
        self.node = torch.where(mask, child, self.node)
        self.lengths = self.lengths + mask

    def verdict(self, tokens: Tensor) -> Verdict:
        return Verdict(self.nodes, self.lengths, tokens, self.node)


def follow(tree: DraftTree, choose: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Verdict:
    """Walk while a child holds the target's token. `choose(sequences, nodes, depths)` → tokens, all [C]."""
    walk = Walk.start(tree)
    token = torch.zeros_like(walk.node)
    for depth in range(tree.max_depth + 1):
        chosen = where(walk.active)
        token[chosen] = choose(chosen, walk.node[chosen], walk.lengths[chosen])
        if depth == tree.max_depth:
            break
        children = rows(tree.children, walk.node)  # [B, K]
        drafted = tree.tokens.gather(1, children.clamp_min(0))
        match = (children >= 0) & (drafted == token[:, None])
        walk.active = walk.active & match.any(-1)
        if not walk.active.any():
            break
        # argmax of a boolean is its first True: the earliest draw
        child = children.gather(1, match.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(1)
        walk.move(walk.active, child)
    return walk.verdict(token)


def follow_choice(
    choose: Callable[[Tensor, Any, Tensor], Tensor], tree: DraftTree, p: Tensor | LawTable, noise: Any
) -> Verdict:
    """`follow` with tokens that `choose` draws from the laws alone."""

    def chosen(sequences: Tensor, nodes: Tensor, depths: Tensor) -> Tensor:
        return choose(rows(p, nodes, sequences), noise.take(sequences), depths)

    return follow(tree, chosen)
