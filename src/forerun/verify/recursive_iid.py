"""Recursive rejection of independent draws (SpecInfer, Miao et al. 2023): each child keeps the law q_k it was
drawn from, and every refusal leaves p ← norm([p − q_k]+) for the next.

Equal tokens drawn twice are two rounds. They may share a node; they may not share a round.
"""

from __future__ import annotations

from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass, positive
from forerun.verify.rejection import SampledRemainder, reject_down
from forerun.verify.rule import BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []
    node = 0
    while True:
        remainder, scale = p[node], 1.0  # p is remainder / scale: dividing is put off
        moved = False
        for k, drawn in enumerate(tree.children[node]):
            x, q = tree.tokens[drawn.child], tree.law(drawn)
            if noise.accept(node, k) * (float(q[x]) * scale) < float(remainder[x]):  # u < p(x) / q(x)
                node, moved = drawn.child, True
                path.append(node)
                break
            left = positive(remainder - remainder.dtype.type(scale) * q)
            left[x] = 0  # refused means p(x) < q(x); rounding must not bring it back
            if mass(left) > 0:
                remainder, scale = left, mass(left)
        if not moved:
            return PlainVerdict(tuple(path), draw(remainder, noise.final(len(path))))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    return reject_down(tree, SampledRemainder.start(tree, p, exhaust=False), noise)


RULE = VerificationRule(
    name="recursive_iid",
    summary="try independent draws in turn, each against what the last one left of p",
    drawings=frozenset({Drawing.IID, Drawing.INDEPENDENT}),
    reference=reference,
    batched=verify,
)
