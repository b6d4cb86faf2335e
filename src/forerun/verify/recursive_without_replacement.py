"""Recursive rejection without replacement (Sequoia, Chen et al. 2024): as with independent draws, but a refused
token also leaves q, so that the next child is judged by the law it was really drawn from."""

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
        # The laws are remainder / scale and q / q_mass: dividing is put off.
        remainder, scale, q_mass = p[node], 1.0, 1.0
        q: Row | None = None
        moved = False
        for k, drawn in enumerate(tree.children[node]):
            x = tree.tokens[drawn.child]
            q = tree.law(drawn).copy() if q is None else q
            if noise.accept(node, k) * (float(q[x]) * scale) < float(remainder[x]) * q_mass:  # u < p(x) / q(x)
                node, moved = drawn.child, True
                path.append(node)
                break
            share = scale / q_mass if q_mass > 0 else 0.0
            left = positive(remainder - remainder.dtype.type(share) * q)
            left[x] = 0  # refused means p(x) < q(x); rounding must not bring it back
            if mass(left) > 0:
                remainder, scale = left, mass(left)
            q[x] = 0
            q_mass = mass(q)
        if not moved:
            return PlainVerdict(tuple(path), draw(remainder, noise.final(len(path))))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    return reject_down(tree, SampledRemainder.start(tree, p, exhaust=True), noise)


RULE = VerificationRule(
    name="recursive_without_replacement",
    summary="try distinct draws in turn; a refused token leaves q too",
    drawings=frozenset({Drawing.WITHOUT_REPLACEMENT}),
    reference=reference,
    batched=verify,
)
