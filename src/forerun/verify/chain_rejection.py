"""Chain rejection (Leviathan et al. 2023, Chen et al. 2023): accept x with probability min(1, p(x)/q(x)), and
on a rejection draw from norm([p − q]+)."""

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
    while tree.children[node]:
        drawn = tree.children[node][0]
        x, q = tree.tokens[drawn.child], tree.law(drawn)
        if not noise.accept(node) * float(q[x]) < float(p[node][x]):  # u < p(x) / q(x)
            residual = positive(p[node] - q)
            if mass(residual) == 0:  # only rounding leads here
                residual = p[node]
            return PlainVerdict(tuple(path), draw(residual, noise.final(len(path))))
        node = drawn.child
        path.append(node)
    return PlainVerdict(tuple(path), draw(p[node], noise.final(len(path))))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    return reject_down(tree, SampledRemainder.start(tree, p, exhaust=False), noise)


RULE = VerificationRule(
    name="chain_rejection",
    summary="accept with probability p/q, else draw from what q left over",
    drawings=frozenset(d for d in Drawing if d.sampled),
    reference=reference,
    batched=verify,
    chain_only=True,
)
