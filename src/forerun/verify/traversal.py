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
from forerun.core.tree import DraftTree, Drawing
from forerun.core.verdict import Verdict
from forerun.verify.batched import Walk, bare, concerned, drop_elder, entries, finished, put, rows
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

    weights: Tensor  # [B, L, V]
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
        # The deepest level has no children to delete.
        weights = p.new_empty(tree.batch, max(levels - 1, 1), p.shape[2])
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
            r = state.r.gather(1, depth).squeeze(1)
            accepted = leaf & ((walk.node == 0) | (noise.accept(walk.node) < r))
            walk.active = walk.active & ~accepted
            if finished(walk.active):
                break
            down = walk.active & ~leaf
            _enter(tree, p, state, walk, down, child.clamp_min(0))
            _leave(tree, p, state, walk, walk.active & leaf)
    weights = rows(p, walk.node)
    level = walk.lengths.clamp_max(state.weights.shape[1] - 1)
    changed = ~state.whole.gather(1, walk.lengths[:, None]).squeeze(1)
    chosen = concerned(changed)
    if chosen.numel():
        put(weights, chosen, changed, state.weights[chosen, level[chosen]])
    return walk.verdict(exact.draw(weights, noise.final(walk.lengths)))


def _enter(tree: DraftTree, p: Tensor, state: _Levels, walk: Walk, down: Tensor, child: Tensor) -> None:
    """Move the sequences of `down` to `child`, with r = min(1, r·p(x)/q(x)) there."""
    assert tree.q is not None
    assert tree.q_rows is not None
    depth = walk.lengths[:, None]
    token = tree.tokens.gather(1, child[:, None]).squeeze(1)
    inner = walk.lengths.clamp_max(state.weights.shape[1] - 1)
    whole = state.whole.gather(1, depth).squeeze(1)
    left = entries(state.weights, inner, token)
    p_x = torch.where(whole, entries(p, walk.node, token), left) / state.scale.gather(1, depth).squeeze(1)
    q_row = rows(tree.q_rows, walk.node)[:, 0].clamp(0, tree.q.shape[1] - 1)
    q_mass = state.q_mass.gather(1, depth).squeeze(1)
    q_x = torch.where(q_mass > 0, entries(tree.q, q_row, token) / q_mass, 0.0)
    r = state.r.gather(1, depth).squeeze(1)
    r = torch.where(q_x > 0, (r * p_x / q_x).clamp_max(1.0), 0.0)

    walk.move(down, child)
    below = walk.lengths[:, None]
    for name, fresh in (("scale", 1.0), ("q_mass", 1.0), ("next", 0), ("whole", True)):
        table: Tensor = getattr(state, name)
        value = torch.where(down[:, None], torch.full_like(table[:, :1], fresh), table.gather(1, below))
        table.scatter_(1, below, value)
    state.r.scatter_(1, below, torch.where(down[:, None], r[:, None], state.r.gather(1, below)))


def _leave(tree: DraftTree, p: Tensor, state: _Levels, walk: Walk, refused: Tensor) -> None:
    """The sequences of `refused` delete the leaf they stand on and go back to its parent."""
    assert tree.q is not None
    assert tree.q_rows is not None
    leaf = walk.node
    token = tree.tokens.gather(1, leaf[:, None]).squeeze(1)
    parent = tree.parents.gather(1, leaf[:, None]).squeeze(1)
    walk.node = torch.where(refused, parent, walk.node)
    walk.lengths = walk.lengths - refused.to(walk.lengths.dtype)
    kept = torch.arange(walk.nodes.shape[1], device=leaf.device) < walk.lengths[:, None]
    walk.nodes = walk.nodes.masked_fill(~kept, -1)

    chosen = concerned(refused)
    if not chosen.numel():
        return
    hit, at, level, node = refused[chosen], chosen, walk.lengths[chosen], walk.node[chosen]
    level = level.clamp_max(state.weights.shape[1] - 1)
    whole, scale, r = state.whole[at, level], state.scale[at, level], state.r[at, level]
    rank, q_mass = state.next[at, level], state.q_mass[at, level]
    before = state.weights[at, level]
    fresh = concerned(whole)
    put(before, fresh, whole, p[at[fresh], node[fresh]])
    q = tree.q[at, tree.q_rows[at, node, 0].clamp(0, tree.q.shape[1] - 1)]
    drop_elder(q, tree, at, node, rank)  # what was deleted earlier has left q
    refused_q = exact.fixed(q.gather(1, token[chosen, None]).squeeze(1)).to(torch.float64) / exact.UNIT
    next_q_mass = q_mass.clone()
    put(next_q_mass, fresh, whole, exact.mass(q[fresh]))
    next_q_mass -= refused_q

    share = torch.where(q_mass > 0, 1 / q_mass, 0.0)
    left = before * (r / scale).to(before.dtype)[:, None]
    left = left.sub_(q.mul_(share.to(before.dtype)[:, None])).clamp_min_(0)
    total = exact.mass(left)
    some = total > 0
    new_r = torch.where(some, total / (total + 1 - r), 0.0)
    if not finished(~some):
        left = torch.where(some[:, None], left, before)
    _set(state.weights, at, level, hit, left)
    _set(state.scale, at, level, hit, torch.where(some, total, scale))
    _set(state.r, at, level, hit, torch.where(node == 0, r, new_r))
    _set(state.q_mass, at, level, hit, next_q_mass)
    _set(state.next, at, level, hit, rank + 1)
    _set(state.whole, at, level, hit, torch.zeros_like(whole))


def _set(table: Tensor, at: Tensor, level: Tensor, hit: Tensor, new: Tensor) -> None:
    """table[at, level] ← new where `hit`, which is everywhere on a CPU."""
    if hit.device.type == "cpu":
        table[at, level] = new
        return
    wide = hit.view(-1, *[1] * (new.dim() - 1))
    table[at, level] = torch.where(wide, new, table[at, level])


RULE = VerificationRule(
    name="traversal",
    summary="judge a tree from its leaves up; accepts more than recursive rejection",
    drawings=frozenset({Drawing.WITHOUT_REPLACEMENT}),
    reference=reference,
    verify=verify,
)
