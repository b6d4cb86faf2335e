"""Sample and match: draw the target's token as plain decoding would, and follow the draft that equals it.

The drafts play no part in the draw, so any drafts will do; nothing is gained from knowing q.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from forerun.core import exact
from forerun.verify import batched, plain
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    return plain.follow(tree, lambda node, depth: plain.draw(p[node], noise.final(depth)))


def choose(p: Tensor, noise: BatchNoise, depths: Tensor) -> Tensor:
    return exact.draw(p, noise.final(depths))


RULE = VerificationRule(
    name="sample_match",
    summary="draw from p, follow the draft that equals the draw",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=partial(batched.follow_choice, choose),
    choose=choose,
    looks_along_the_path=True,
)
