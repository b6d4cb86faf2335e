"""The tree of EAGLE-2 (Li et al., 2024): grown and pruned by the drafter's own confidence.

A node's value V is the product of the confidences along its path, the drafter's estimate of the chance that
the target accepts the whole path. *Expand*: level by level, the `width` most valuable nodes of the last level
get children. *Rerank*: of everything grown, the most valuable nodes are kept. Here V is a sum of logs, in
float32.

The shape depends on the tokens, so the children must be *fixed* (a function of the context, such as the
drafter's top candidates). Sampling children and then pruning them by confidence would keep tokens that are no
longer distributed as q, and no rule that relies on q could make that lossless.

Why the kept tree is connected. A confidence is at most 1, so V never grows along a path, in float32 too:
rounding is monotone. It can stay equal (a confidence of 1, or one lost in rounding), and then the tie must go
to the parent. Nodes are listed in the order they grow, parents before children, and every sort is stable, so
it does. A log confidence above 0 would break this. The usual cause is the rounding of a log-softmax and the
values live on the device, where looking at them would stall the pipeline: they are clamped to 0, not refused.
NaN is read as "no such candidate". A lossless rule gives the same law for any tree of fixed children, so
neither can spoil the text, only how much of it is guessed right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.shape import TreeShape


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes about to get children, in falling order of value. The root alone at first.

    The width is the same for every sequence: where one has fewer nodes, the rest have a log value of -inf and
    token 0, and whatever is returned as their children is ignored.
    """

    nodes: Tensor  # [B, F] int64, indices into the list of grown nodes, whose node 0 is the root
    tokens: Tensor  # [B, F] int64
    parents: Tensor  # [B, F] int64, indices into the same list; -1 for the root
    log_values: Tensor  # [B, F] float32
    depth: int  # of these nodes; the root has 0


@dataclass(frozen=True, eq=False)
class Grown:
    """One tree per sequence, nodes in falling order of value, ties to the shallower, then to the earlier.

    Every parent precedes its child, siblings stand in order of confidence, and the first m columns are the
    best tree of m nodes for every m. Column 0 is the root. Where a sequence grew fewer nodes, the columns at
    the end are padding: token 0, parent -1, log value -inf.
    """

    tokens: Tensor  # [B, M] int64
    parents: Tensor  # [B, M] int64, columns of this table; -1 for the root and for padding
    log_values: Tensor  # [B, M] float32

    def shape(self, row: int) -> TreeShape:
        """The shape of one sequence's tree, without its padding. Waits for the device: not for the loop."""
        drafted = [parent for parent in self.parents[row, 1:].tolist() if parent >= 0]
        return TreeShape((-1, *drafted))


# (tokens [B, F, C], log confidences [B, F, C]) of the C candidates after each frontier node. C is at least 1
# and may differ from level to level; a candidate with log confidence -inf does not exist. They may come in
# any order: siblings are ranked by confidence, equal ones as they came.
Children = Callable[[Frontier], tuple[Tensor, Tensor]]


def expand_and_rerank(
    root_tokens: Tensor,  # [B]
    children: Children,
    *,
    width: int,
    depth: int,
    size: int,
) -> Grown:
    """Grow `depth` levels from at most `width` nodes each, keep the `size - 1` most valuable and the root.

    Runs on the device of `root_tokens` without waiting for it: no shape depends on a value, so that a CUDA
    graph can hold it. The result always has `size` columns.
    """
    _check(width, depth, size)
    if root_tokens.dim() != 1:
        raise ValueError(f"root_tokens has shape {tuple(root_tokens.shape)}: give one token per sequence, [B]")

    root = root_tokens.to(torch.int64)[:, None]  # [B, 1]
    frontier = Frontier(
        nodes=torch.zeros_like(root),
        tokens=root,
        parents=torch.full_like(root, -1),
        log_values=torch.zeros_like(root, dtype=torch.float32),
        depth=0,
    )
    levels = [frontier]
    grown = 1
    if size == 1:
        depth = 0  # a root alone needs no drafting
    for level in range(1, depth + 1):
        nodes = _grow(frontier, children, first=grown)
        levels.append(nodes)
        grown += nodes.nodes.shape[1]
        if level < depth:
            frontier = _most_valuable(nodes, width)
    tokens, parents, log_values = (
        torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("tokens", "parents", "log_values")
    )
    return rerank(tokens, parents, log_values, size)


def _grow(frontier: Frontier, children: Children, first: int) -> Frontier:
    """All children of the frontier as the next level: F·C nodes, numbered from `first` on.

    They stand in the order of their parents, siblings in falling confidence (equal ones as they came).
    """
    tokens, confidences = children(frontier)
    B, F = frontier.nodes.shape
    if tokens.shape != confidences.shape or tokens.dim() != 3 or tokens.shape[:2] != (B, F) or tokens.shape[2] < 1:
        raise ValueError(
            f"children returned tokens {tuple(tokens.shape)} and log confidences {tuple(confidences.shape)}: "
            f"both must be [{B}, {F}, C] with C ≥ 1; a candidate that does not exist has log confidence -inf"
        )
    confidences = confidences.to(torch.float32).nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0.0)
    confidences, by_confidence = confidences.sort(dim=-1, descending=True, stable=True)  # [B, F, C]
    # -inf + x = -inf: what hangs below an absent frontier node is absent as well.
    log_values = frontier.log_values[:, :, None] + confidences  # [B, F, C]
    tokens = tokens.to(torch.int64).gather(-1, by_confidence)
    # An absent candidate's id need not be a valid one: it must not reach an embedding.
    tokens = torch.where(log_values > -math.inf, tokens, 0)

    count = tokens.shape[1] * tokens.shape[2]
    return Frontier(
        nodes=torch.arange(first, first + count, device=tokens.device).expand(B, count),
        tokens=tokens.reshape(B, count),
        parents=frontier.nodes[:, :, None].expand_as(tokens).reshape(B, count),
        log_values=log_values.reshape(B, count),
        depth=frontier.depth + 1,
    )


def _most_valuable(level: Frontier, width: int) -> Frontier:
    """The `width` nodes with the largest V, ties to the earlier. (topk would break ties as it likes.)"""
    log_values, order = level.log_values.sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]  # [B, F]
    return replace(
        level,
        nodes=level.nodes.gather(1, order),
        tokens=level.tokens.gather(1, order),
        parents=level.parents.gather(1, order),
        log_values=log_values[:, :width],
    )


def rerank(tokens: Tensor, parents: Tensor, log_values: Tensor, size: int) -> Grown:
    """The root and the `size - 1` most valuable of all grown nodes [B, G], parents renumbered.

    One stable sort does it: the root is first with log V = 0, no ancestor comes after its descendant, and
    what does not exist is last with -inf.
    """
    missing = max(0, size - tokens.shape[1])
    pad = torch.nn.functional.pad
    tokens = pad(tokens, (0, missing), value=0)  # [B, N], N ≥ size
    parents = pad(parents, (0, missing), value=-1)
    log_values = pad(log_values, (0, missing), value=-math.inf)

    log_values, order = log_values.sort(dim=1, descending=True, stable=True)  # [B, N]
    # The inverse permutation: the column to which each grown node has moved.
    column = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    log_values, order = log_values[:, :size], order[:, :size]
    parents = parents.gather(1, order)  # [B, size], still numbered as grown
    drafted = (parents >= 0) & (log_values > -math.inf)
    return Grown(
        tokens=tokens.gather(1, order),
        parents=torch.where(drafted, column.gather(1, parents.clamp(min=0)), -1),
        log_values=log_values,
    )


@dataclass(frozen=True)
class Node:
    """A node of the plain reference."""

    token: int
    parent: int  # index into the list that holds the node; -1 for the root
    depth: int
    log_value: float


def reference_expand_and_rerank(
    root_token: int,
    children: Callable[[list[Node]], list[list[tuple[int, float]]]],
    *,
    width: int,
    depth: int,
    size: int,
) -> list[Node]:
    """The same for one sequence, written as the paper tells it. What does not exist is simply not there.

    `children` gives, for each node of the frontier, its candidates as (token, log confidence).
    """
    _check(width, depth, size)
    grown = [Node(root_token, parent=-1, depth=0, log_value=0.0)]
    level = [0]
    for d in range(1, depth + 1):
        # Expand: the most valuable nodes of the last level get children. (Python's sort is stable.)
        frontier = sorted(level, key=lambda i: -grown[i].log_value)[:width]
        level = []
        for parent, candidates in zip(frontier, children([grown[i] for i in frontier]), strict=True):
            existing = [(token, min(_float32(c), 0.0)) for token, c in candidates if c > -math.inf]
            for token, confidence in sorted(existing, key=lambda candidate: -candidate[1]):
                log_value = _float32(grown[parent].log_value + confidence)
                if log_value > -math.inf:  # it may overflow, where -3.4e38 stands for "masked"
                    level.append(len(grown))
                    grown.append(Node(token, parent, d, log_value))
    # Rerank: the most valuable of all that was grown.
    kept = sorted(range(len(grown)), key=lambda i: -grown[i].log_value)[:size]
    return [replace(grown[i], parent=kept.index(grown[i].parent) if i else -1) for i in kept]


def _float32(x: float) -> float:
    """Rounded as the batched form rounds; a float64 sum rounded once more is the float32 sum."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def _check(width: int, depth: int, size: int) -> None:
    if width < 1:
        raise ValueError(f"width is {width}: a level grows from at least 1 node; for no drafting give depth=0")
    if depth < 0:
        raise ValueError(f"depth is {depth}: give the number of drafted levels, 0 for none")
    if size < 1:
        raise ValueError(f"size is {size}: a tree has at least its root, so ask for 1 or more")


def examples() -> list[TreeShape]:
    """Grown from fixed tables: a sure drafter goes deep, a doubtful one wide, and the third lies between."""
    tables = torch.tensor([[0.9, 0.05, 0.03], [0.4, 0.35, 0.2], [0.6, 0.3, 0.1]]).log()  # [B, C]

    def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
        confidences = tables[:, None, :].expand(-1, frontier.nodes.shape[1], -1)  # [B, F, C]
        return torch.arange(3).expand_as(confidences), confidences

    grown = expand_and_rerank(torch.zeros(3, dtype=torch.int64), children, width=2, depth=3, size=6)
    return [grown.shape(row) for row in range(3)]
