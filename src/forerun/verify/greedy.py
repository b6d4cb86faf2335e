"""Greedy match: at temperature 0 the target's token is the argmax, and drafts either are it or are not."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from forerun.core import exact
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify import batched, plain
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    return plain.follow(tree, lambda node, depth: int(np.argmax(p[node])))


def verify(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
    return batched.follow(tree, lambda sequences, nodes, depths: exact.argmax(batched.rows(p, nodes, sequences)))


RULE = VerificationRule(
    name="greedy",
    summary="follow the target's most likely token",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=verify,
    greedy_only=True,
)
