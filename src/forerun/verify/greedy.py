"""Greedy match: at temperature 0 the target's token is the argmax, and drafts either are it or are not."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from forerun.core import exact
from forerun.verify import batched, plain
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row
from forerun.verify.rule import ANY_DRAWING, BatchNoise, VerificationRule


def reference(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    return plain.follow(tree, lambda node, depth: int(np.argmax(p[node])))


def choose(p: Tensor, noise: BatchNoise, depths: Tensor) -> Tensor:
    return exact.argmax(p)


RULE = VerificationRule(
    name="greedy",
    summary="follow the target's most likely token",
    drawings=ANY_DRAWING,
    reference=reference,
    batched=partial(batched.follow_choice, choose),
    choose=choose,
    looks_along_the_path=True,
    greedy_only=True,
)
