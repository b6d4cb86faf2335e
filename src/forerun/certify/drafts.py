"""Whether drafts come out as often as they should: a wrong rule favours what was drafted, or the opposite.

At the root of a step let A be the tokens that were drafted, where the drafts are fixed, or those that q finds likelier
than p does, where they are sampled. A is known before anything is drawn, so the first token of the step lies in it with
the chance p(A), whatever the rule does later: all steps make one test. It takes the laws that the rule itself was
given, so it costs no pass; whether those are right is for the other tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forerun.certify.statistics import Fit, balance
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.batched import rows
from forerun.verify.rule import BatchNoise, VerificationRule


@dataclass
class DraftCount:
    hits: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def watch(self, rule: VerificationRule) -> VerificationRule:
        """The same rule. One that draws without a look at the drafts is left alone, and so are coupled drafts, which
        know the noise of the token that they guess."""
        if rule.choose is not None or rule.name == "gumbel":
            return rule

        def verify(tree: DraftTree, p: Any, noise: BatchNoise) -> Verdict:
            verdict = rule.batched(tree, p, noise)
            if tree.children.shape[2]:
                self._count(tree, rows(p, torch.zeros_like(verdict.stops)), verdict)
            return verdict

        return replace(rule, batched=verify)

    def fit(self) -> Fit | None:
        return balance(self.hits, self.chances)

    def _count(self, tree: DraftTree, p: torch.Tensor, verdict: Verdict) -> None:
        """p [B, V] at the roots."""
        drawn = tree.children[:, 0]  # [B, K]
        if tree.q is None or tree.q_rows is None:
            tokens = tree.tokens.gather(1, drawn.clamp_min(0))
            favoured = torch.zeros_like(p).scatter_add_(1, tokens, (drawn >= 0).to(p.dtype)) > 0
        else:
            favoured = rows(tree.q, tree.q_rows[:, 0, 0].clamp_min(0)) > p
        chance = torch.where(favoured, p, 0.0).double().sum(1)
        hit = favoured.gather(1, verdict.committed(tree.tokens)[:, :1])[:, 0].double()
        drafted = drawn[:, 0] >= 0
        self.hits += hit[drafted].tolist()
        self.chances += chance[drafted].tolist()
