"""Traversal verification: judge a tree from its leaves up. Block verification does this for a chain; here a refused
leaf is taken out of the tree and what remains is judged again.

Along a path r_i = min(1, r_{i−1}·p(x_i)/q(x_i)). The leftmost leaf's whole path is accepted with probability
r(leaf). Otherwise the leaf is deleted and at its parent, with S = Σ[r·p − q]+:
p ← [r·p − q]+/S, q ← q without that token, r ← S/(S + 1 − r), where the root keeps r = 1.
A parent without children left is a leaf itself; the root is always accepted, and the token comes from its p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import Walk, bare, drop_elder, rows, where
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass, positive
from forerun.verify.rule import BatchNoise, VerificationRule


@dataclass
class _Node:
    """What is left at a node: p is `weights`/`scale`, q is `q`/`q_mass`, `next` the child to judge next."""

    weights: Row
    r: float
    scale: float = 1.0
    q: Row | None = None
    q_mass: float = 1.0
    next: int = 0


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []  # without the root
    here = {0: _Node(p[0], r=1.0)}
    node = 0
    while True:
        state = here[node]
        if state.next < len(tree.children[node]):  # down to the leftmost leaf
            drawn = tree.children[node][state.next]
            x = tree.tokens[drawn.child]
            if state.q is None:
                state.q = tree.law(drawn).copy()
            node = drawn.child
            path.append(node)
            p_x = float(state.weights[x]) / state.scale
            q_x = float(state.q[x]) / state.q_mass if state.q_mass > 0 else 0.0
            here[node] = _Node(p[node], r=min(1.0, state.r * p_x / q_x) if q_x > 0 else 0.0)
        elif node == 0 or noise.accept(node) < state.r:
            return PlainVerdict(tuple(path), draw(state.weights, noise.final(len(path))))
        else:
            x = tree.tokens[path.pop()]
            node = path[-1] if path else 0
            _delete(here[node], x, root=node == 0)


def _delete(state: _Node, x: int, *, root: bool) -> None:
    """Take the refused child x out of a node."""
    assert state.q is not None, "a child was drawn from it"
    one = state.weights.dtype.type
    share = 1 / state.q_mass if state.q_mass > 0 else 0.0
    left = positive(state.weights * one(state.r / state.scale) - state.q * one(share))
    total = mass(left)
    if total > 0:
        state.weights, state.scale = left, total
    if not root:
        state.r = total / (total + 1 - state.r) if total > 0 else 0.0
    state.q[x] = 0
    state.q_mass = mass(state.q)
    state.next += 1


@dataclass
class _Levels:
    """What is left at the nodes between the root and where a sequence stands, one level [B, ...] per depth.

    Rows are written when a first child is deleted; until then (`whole`) p is the target's own row.
    """

    weights: Tensor  # [B, L - 1, V]; the deepest level has no children to delete
    scale: Tensor  # [B, L] float64
    q_mass: Tensor  # [B, L] float64
    r: Tensor  # [B, L] float64
    next: Tensor  # [B, L]
    whole: Tensor  # [B, L] bool

    @classmethod
    def start(cls, tree: DraftTree, p: Tensor) -> _Levels:
        levels = tree.max_depth + 1
        one = torch.ones(tree.batch, levels, dtype=torch.float64, device=p.device)
        zero = torch.zeros(tree.batch, levels, dtype=torch.int64, device=p.device)
        weights = p.new_empty(tree.batch, levels - 1, p.shape[2])
        return cls(weights, one, one.clone(), one.clone(), zero, one > 0)


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    """Each round every sequence goes one node down, or judges the leaf it stands on."""
    walk = Walk.start(tree)
    state = _Levels.start(tree, p)
    if not bare(tree):
        for _ in range(2 * tree.size - 1):
            depth = walk.lengths[:, None]
            rank = state.next.gather(1, depth).squeeze(1)
            child = rows(tree.children, walk.node).gather(1, rank.clamp_max(tree.width - 1)[:, None]).squeeze(1)
            leaf = (rank >= tree.width) | (child < 0)
            accepted = leaf & ((walk.node == 0) | (noise.accept(walk.node) < state.r.gather(1, depth).squeeze(1)))
            walk.active = walk.active & ~accepted
            if not walk.active.any():
                break
            refused = walk.active & leaf
            _enter(tree, p, state, walk, walk.active & ~leaf, child)
            _leave(tree, p, state, walk, where(refused))
    weights = rows(p, walk.node)
    changed = where(~state.whole.gather(1, walk.lengths[:, None]).squeeze(1))
    weights.index_copy_(0, changed, rows(state.weights, walk.lengths[changed], changed))
    return walk.verdict(exact.draw(weights, noise.final(walk.lengths)))


def _enter(tree: DraftTree, p: Tensor, state: _Levels, walk: Walk, down: Tensor, child: Tensor) -> None:
    """Move the sequences of `down` [B] to `child`, with r = min(1, r·p(x)/q(x)) there."""
    assert tree.q is not None, "only sampled trees have q"
    assert tree.q_rows is not None, "only sampled trees have q"
    at = where(down)
    node, level = walk.node[at], walk.lengths[at]
    token = tree.tokens[at, child[at]]
    p_x = torch.where(state.whole[at, level], p[at, node, token], state.weights[at, level, token]).to(torch.float64)
    q_x = tree.q[at, tree.q_rows[at, node, 0], token].to(torch.float64)
    q_mass = state.q_mass[at, level]
    q_x = torch.where(q_mass > 0, q_x / q_mass, 0.0)
    r = state.r[at, level] * (p_x / state.scale[at, level]) / q_x

    walk.move(down, child)
    below = level + 1
    state.r[at, below] = torch.where(q_x > 0, r.clamp_max(1.0), 0.0)
    state.scale[at, below] = 1.0
    state.q_mass[at, below] = 1.0
    state.next[at, below] = 0
    state.whole[at, below] = True


def _leave(tree: DraftTree, p: Tensor, state: _Levels, walk: Walk, at: Tensor) -> None:
    """The sequences `at` delete the leaf they stand on and go back to its parent."""
    assert tree.q is not None, "only sampled trees have q"
    assert tree.q_rows is not None, "only sampled trees have q"
    if not at.numel():
        return
    leaf, level = walk.node[at], walk.lengths[at] - 1
    token, node = tree.tokens[at, leaf], tree.parents[at, leaf]
    walk.node[at], walk.lengths[at], walk.nodes[at, level] = node, level, -1

    whole, scale, r = state.whole[at, level], state.scale[at, level], state.r[at, level]
    rank, q_mass = state.next[at, level], state.q_mass[at, level]
    fresh = where(whole)
    before = rows(state.weights, level, at)
    before.index_copy_(0, fresh, rows(p, node[fresh], at[fresh]))
    q = rows(tree.q, tree.q_rows[at, node, 0], at)
    drop_elder(q, tree, at, node, rank)  # what was deleted earlier has left q
    left_of_q = q_mass.clone()
    left_of_q[fresh] = exact.mass(q.index_select(0, fresh))
    left_of_q -= exact.fixed(q.gather(1, token[:, None]).squeeze(1)).to(torch.float64) / exact.UNIT

    share = torch.where(q_mass > 0, 1 / q_mass, 0.0).to(before.dtype)
    left = (before * (r / scale).to(before.dtype)[:, None]).sub_(q.mul_(share[:, None])).clamp_min_(0)
    total = exact.mass(left)
    some = total > 0
    lost = ~some & (node == 0)  # only by rounding; below the root r becomes 0, and nothing is drawn from here
    if lost.any():
        left = torch.where(lost[:, None], before, left)
    state.weights.view(-1, p.shape[2]).index_copy_(0, at * state.weights.shape[1] + level, left)
    state.scale[at, level] = torch.where(some, total, scale)
    new_r = torch.where(some, total / (total + 1 - r), 0.0)
    state.r[at, level] = torch.where(node == 0, r, new_r)
    state.q_mass[at, level] = left_of_q
    state.next[at, level] = rank + 1
    state.whole[at, level] = False


RULE = VerificationRule(
    name="traversal",
    summary="judge a tree from its leaves up; accepts more than recursive rejection",
    drawings=frozenset({Drawing.WITHOUT_REPLACEMENT}),
    reference=reference,
    batched=verify,
)
