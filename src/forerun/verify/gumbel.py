"""Gumbel coupling: with noise g fixed by (seed, position), the target's token is argmax(log p + g), whatever
drafts it. A drafter that ranks its candidates by log q + g with the same noise guesses it more often than not.

With E = exp(−g), standard exponential, log p + g is largest where p / E is: no logarithm of p is needed, and
the verdict has the same bits on every device.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify import batched, plain
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    return plain.follow(tree, lambda node, depth: int(np.argmax(p[node] / noise.race(depth))))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    def choose(sequences: Tensor, nodes: Tensor, depths: Tensor) -> Tensor:
        return noise.take(sequences).first_arrival(batched.rows(p, nodes, sequences), depths)

    return batched.follow(tree, choose)


RULE = VerificationRule(
    name="gumbel",
    summary="the token that plain sampling takes with the same seed",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=verify,
)
