"""Gumbel coupling: with noise g fixed by (seed, position), the target's token is argmax(log p + g), whatever
drafts it. A drafter that ranks its candidates by log q + g with the same noise guesses it more often than not.

With E = exp(−g), standard exponential, log p + g is largest where p / E is: no logarithm of p is needed, and
the verdict has the same bits on every device.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from forerun.verify import batched, plain
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    return plain.follow(tree, lambda node, depth: int(np.argmax(p[node] / noise.race(depth))))


def choose(p: Tensor, noise: BatchNoise, depths: Tensor) -> Tensor:
    return noise.first_arrival(p, depths)


RULE = VerificationRule(
    name="gumbel",
    summary="the token that plain sampling takes with the same seed",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=partial(batched.follow_choice, choose),
    choose=choose,
    looks_along_the_path=True,
)
