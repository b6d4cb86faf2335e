"""Block verification (Sun et al. 2024): judge a chain as a whole. A late draft can make up for an early one that
was less likely under p than under q, so at least as much is accepted as by chain rejection.

r_i = min(1, r_{i−1}·p(x_i)/q(x_i)); S_i = Σ_x [r_i·p(x|x≤i) − q(x|x≤i)]+; h_i = S_i/(S_i + 1 − r_i), h_γ = r_γ.
The length is the largest i ≥ 1 with u_i < h_i, else 0. The last token comes from p after the whole chain, else
from norm([r_τ·p − q]+).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import Walk, bare, entries, rows, where
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass, positive
from forerun.verify.rule import BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []
    node, r = 0, 1.0
    ratio, length = [1.0], 0
    while tree.children[node]:
        drawn = tree.children[node][0]
        x, q = tree.tokens[drawn.child], tree.law(drawn)
        r = min(1.0, r * float(p[node][x]) / float(q[x])) if q[x] > 0 else 0.0
        node = drawn.child
        path.append(node)
        ratio.append(r)
        if tree.children[node]:
            left = mass(_residual(p[node], tree.law(tree.children[node][0]), r))
            h = left / (left + 1 - r) if left > 0 else 0.0
        else:
            h = r
        if noise.accept(node) < h:
            length = len(path)
    stop = path[length - 1] if length else 0
    weights = p[stop]
    if tree.children[stop]:
        residual = _residual(p[stop], tree.law(tree.children[stop][0]), ratio[length])
        weights = residual if mass(residual) > 0 else weights  # empty only by rounding
    return PlainVerdict(tuple(path[:length]), draw(weights, noise.final(length)))


def _residual(p: Row, q: Row, r: float) -> Row:
    return positive(p * p.dtype.type(r) - q)


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    assert tree.q is not None, "only sampled trees have q"
    assert tree.q_rows is not None, "only sampled trees have q"
    walk = Walk.start(tree)
    if bare(tree):
        return walk.verdict(exact.draw(rows(p, walk.node), noise.final(walk.lengths)))
    r = torch.ones(tree.batch, dtype=torch.float64, device=p.device)
    # Where each sequence would stop: the node, the ratio there, and how many drafts that accepts.
    stop, stop_r, length = walk.node, r, walk.lengths
    for _ in range(tree.max_depth):
        child = rows(tree.children, walk.node)[:, 0]
        walk.active = walk.active & (child >= 0)
        if not walk.active.any():
            break
        child = child.clamp_min(0)
        token = tree.tokens.gather(1, child[:, None]).squeeze(1)
        q_row = rows(tree.q_rows, walk.node)[:, 0]
        q_x = entries(tree.q, q_row, token)
        ratio = torch.where(q_x > 0, (r * entries(p, walk.node, token) / q_x).clamp_max(1.0), 0.0)
        r = torch.where(walk.active, ratio, r)
        walk.move(walk.active, child)
        inner = rows(tree.children, walk.node)[:, 0] >= 0
        left = _residuals(tree, p, walk.node, r, inner & walk.active)[0]
        h = torch.where(inner, torch.where(left > 0, left / (left + 1 - r), 0.0), r)  # r at the end of the chain
        accepted = walk.active & (noise.accept(walk.node) < h)
        stop = torch.where(accepted, walk.node, stop)
        stop_r = torch.where(accepted, r, stop_r)
        length = torch.where(accepted, walk.lengths, length)
    weights = rows(p, stop)
    inner = rows(tree.children, stop)[:, 0] >= 0
    left, residual, chosen = _residuals(tree, p, stop, stop_r, inner)
    some = left[chosen] > 0  # empty only by rounding
    weights.index_copy_(0, chosen[some], residual[some])
    kept = torch.arange(tree.max_depth, device=p.device) < length[:, None]
    nodes = walk.nodes.masked_fill(~kept, -1)
    return Verdict(nodes, length, exact.draw(weights, noise.final(length)), stop)


def _residuals(tree: DraftTree, p: Tensor, node: Tensor, r: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[r·p − q]+ at `node` for the sequences of `mask`: its mass [B] (0 elsewhere), its rows, and whose they are."""
    assert tree.q is not None
    assert tree.q_rows is not None
    chosen = where(mask)
    left = torch.zeros_like(r)
    at = node[chosen]
    q = rows(tree.q, tree.q_rows[chosen, at, 0], chosen)
    residual = rows(p, at, chosen).mul_(r[chosen].to(p.dtype)[:, None]).sub_(q).clamp_min_(0)
    left[chosen] = exact.mass(residual)
    return left, residual, chosen


RULE = VerificationRule(
    name="block",
    summary="judge a chain as a whole; accepts at least what chain rejection does",
    drawings=frozenset(d for d in Drawing if d.sampled),
    reference=reference,
    batched=verify,
    chain_only=True,
)
