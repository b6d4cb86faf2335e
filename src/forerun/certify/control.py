"""Rules that are changed on purpose.

The *broken* rule is the control: it keeps the draft that was refused, where the target's own token belongs. A test that
cannot tell it from the right rule proves nothing, so its certificate is refused. The rule that meets zeros looks for
`u <= p/q`: only the number 0 shows it, and no sample ever meets that number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.rule import BatchNoise, VerificationRule


def broken(rule: VerificationRule) -> VerificationRule:
    def verify(tree: DraftTree, p: Any, noise: BatchNoise) -> Verdict:
        verdict = rule.batched(tree, p, noise)
        if tree.children.shape[2] == 0:
            return verdict
        each = torch.arange(tree.batch, device=tree.tokens.device)
        first = tree.children[each, verdict.stops, 0]
        refused = tree.tokens[each, first.clamp_min(0)]
        return replace(verdict, tokens=torch.where(first >= 0, refused, verdict.tokens))

    # The engine has a shortcut for the rule named greedy, and coupled drafts for the one named gumbel.
    name = "gumbel" if rule.name == "gumbel" else f"{rule.name}, broken"
    return replace(rule, name=name, batched=verify, choose=None)


def at_zero(rule: VerificationRule) -> VerificationRule:
    """Every uniform number that accepts or refuses is 0: whatever p allows is accepted, and nothing else may be."""
    return replace(rule, batched=lambda tree, p, noise: rule.batched(tree, p, _Zeros(noise)))


def decides_by_uniforms(rule: VerificationRule) -> bool:
    return rule.choose is None


@dataclass(frozen=True)
class _Zeros:
    noise: BatchNoise

    def accept(self, nodes: Tensor, rank: int | Tensor = 0) -> Tensor:
        return torch.zeros_like(self.noise.accept(nodes, rank))

    def final(self, depths: Tensor) -> Tensor:
        return self.noise.final(depths)

    def first_arrival(self, p: Tensor, depths: Tensor) -> Tensor:
        return self.noise.first_arrival(p, depths)

    def take(self, sequences: Tensor) -> _Zeros:
        return _Zeros(self.noise.take(sequences))
