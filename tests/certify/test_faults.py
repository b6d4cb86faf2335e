"""Mistakes planted in engine, rules and drafters, one at a time: a certificate must not be had with any of them.

They are those of `docs/faults.md` and of `tests/engine/test_faults.py`, found here from outside, as a user would."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.certify.subject import ChangeableEngine
from forerun.core import exact
from forerun.core.drawing import Drawing, iid_children
from forerun.core.law import LawSettings
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Drafter
from forerun.engine import judge as judge_module
from forerun.engine.judge import Decision
from forerun.engine.laws import SettingsMemo
from forerun.engine.request import Job
from forerun.verify.batched import entries, rows
from forerun.verify.rejection import SampledRemainder, Trial
from forerun.verify.rule import all_rules
from tests.certify.tiny_subject import GREEDY, KNOWN, SAMPLED, certified, draft_model
from tests.engine import test_faults as engine_faults
from tests.engine.tiny import RandomTrees

Plant = Callable[[pytest.MonkeyPatch], None]


# --- rules


def accepts_at_equality(patch: pytest.MonkeyPatch) -> None:
    """`u <= p/q`: wrong at u = 0 alone."""

    def accepts(self: SampledRemainder, trial: Trial) -> Tensor:
        left = self.row.gather(1, trial.token[:, None]).squeeze(1).to(torch.float64)
        p = torch.where(self.whole, entries(self.p, trial.node, trial.token), left)
        q = entries(self._q(), trial.q_row, trial.token)
        return trial.u * (q * self.scale) <= p * self.q_mass

    patch.setattr(SampledRemainder, "accepts", accepts)


def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    """What the residual lacks falls to the last token, as a search that runs past the end finds it."""
    weights = SampledRemainder.weights

    def spoiled(self: SampledRemainder, node: Tensor, rank: Tensor) -> Tensor:
        left = weights(self, node, rank)
        left[:, -1] += (1 - left.sum(-1)).clamp_min(0)
        return left

    patch.setattr(SampledRemainder, "weights", spoiled)


def correction_from_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SampledRemainder, "weights", lambda self, node, rank: rows(self.p, node))


def residual_transformed_again(patch: pytest.MonkeyPatch) -> None:
    weights = SampledRemainder.weights
    patch.setattr(
        SampledRemainder,
        "weights",
        lambda self, node, rank: torch.nn.functional.normalize(weights(self, node, rank) ** 2, 1, -1),
    )


def bonus_dropped(patch: pytest.MonkeyPatch) -> None:
    decide = judge_module._decide

    def spoiled(*arguments: object) -> list[Decision]:
        found = decide(*arguments)  # type: ignore[arg-type]
        return [each if each.corrected or not each.path else replace(each, tokens=each.tokens[:-1]) for each in found]

    patch.setattr(judge_module, "_decide", spoiled)


# --- laws


def target_not_transformed(patch: pytest.MonkeyPatch) -> None:
    def plain(self: SettingsMemo, jobs: Many[Job], device: torch.device) -> LawSettings:
        return LawSettings.of([SamplingParams()] * len(jobs), device)

    patch.setattr(SettingsMemo, "of", plain)


def half_a_temperature(patch: pytest.MonkeyPatch) -> None:
    draw = exact.draw
    patch.setattr(exact, "draw", lambda weights, u: draw(weights**1.5, u))


# --- drafters


class Spoiled:
    """A draft model whose trees are spoiled before they are handed in."""

    def __init__(self, tree: str, spoil: Callable[[DraftTree], DraftTree]) -> None:
        self.drafter, self.spoil = draft_model(tree), spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        return self.spoil(self.drafter.draft(sequences, budgets))


def q_transformed_after_drawing(tree: DraftTree) -> DraftTree:
    """What is written down is not what was drawn from."""
    assert tree.q is not None
    return replace(tree, q=torch.nn.functional.normalize(tree.q**3, 1, -1))


def pruned_by_confidence(tree: DraftTree) -> DraftTree:
    """A draft of one token is left out where q finds others likelier."""
    if tree.size < 2:
        return tree
    assert tree.q is not None
    law = tree.q[:, 0]
    best = law.gather(1, tree.tokens[:, 1:2]) >= law.max(1, keepdim=True).values
    return replace(tree, children=torch.where(best[:, :, None], tree.children, -1))


def weaker_child_dropped(tree: DraftTree) -> DraftTree:
    """Of two children that were drawn for the root, the one that q finds less likely is left out."""
    return _ordered_by_q(tree, keeps=1)


def likelier_child_first(tree: DraftTree) -> DraftTree:
    """Two children that were drawn for the root are put in the order of q."""
    return _ordered_by_q(tree, keeps=2)


class TwoDraws(Spoiled):
    """Two draws from a law that knows two tokens: the likeliest one, which it finds less likely than the target
    does, and the next one. So the same token comes twice more often than not."""

    drawing, branches = Drawing.IID, True

    def __init__(self, spoil: Callable[[DraftTree], DraftTree]) -> None:
        self.drafter, self.spoil = draft_model("1", apart=0), spoil
        self.generator = torch.Generator().manual_seed(3)

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        chain = self.drafter.draft(sequences, budgets)
        if chain.size < 2:
            return chain
        assert chain.q is not None
        best = chain.q[:, 0].topk(2, 1)
        likeliest = 0.6 * best.values[:, :1]
        law = torch.zeros_like(chain.q[:, 0]).scatter_(1, best.indices, torch.cat([likeliest, 1 - likeliest], 1))
        draws = iid_children(law, torch.rand(chain.batch, 2, generator=self.generator, dtype=torch.float64))
        tokens = torch.cat([chain.tokens[:, :1], draws], 1)
        parents = torch.cat([chain.parents[:, :1], chain.parents[:, 1:2].expand(-1, 2)], 1)
        laws = law[:, None].expand(-1, 3, -1)
        return self.spoil(DraftTree.build(tokens, parents, chain.positions[:, 0], Drawing.IID, q=laws))


def equal_draws_merged(tree: DraftTree) -> DraftTree:
    """One round for a token that was drawn twice."""
    if tree.size < 3:
        return tree
    children = tree.children.clone()
    children[:, 0, 1] = torch.where(tree.tokens[:, 1] == tree.tokens[:, 2], -1, children[:, 0, 1])
    return replace(tree, children=children)


def unspoiled(tree: DraftTree) -> DraftTree:
    return tree


def _ordered_by_q(tree: DraftTree, keeps: int) -> DraftTree:
    assert tree.q is not None
    assert tree.q_rows is not None
    children = tree.children.clone()
    for b in range(tree.batch):
        nodes = children[b, 0].tolist()
        if len(nodes) < 2 or nodes[1] < 0:
            continue
        chances = tree.q[b, tree.q_rows[b, 0, 0]][tree.tokens[b, nodes[:2]]].tolist()
        best, other = nodes[:2] if chances[0] >= chances[1] else nodes[1::-1]
        children[b, 0, 0], children[b, 0, 1] = best, other if keeps == 2 else -1
    return replace(tree, children=children)


def greedy_is_not_one_hot(patch: pytest.MonkeyPatch) -> None:
    """Temperature 0 is sampled at temperature 1, by the rule for samples."""
    target_not_transformed(patch)
    patch.setattr(ChangeableEngine, "rule_for", lambda self, request: all_rules()["chain_rejection"])


# --- the list


@dataclass(frozen=True)
class Case:
    plant: Plant
    drafter: Callable[[], Drafter]
    settings: SamplingParams
    rule: str | None = None
    samples: int = 60


def nothing(patch: pytest.MonkeyPatch) -> None: ...


def trees() -> Drafter:
    return RandomTrees(4, KNOWN)


def chain() -> Drafter:
    return draft_model("3")


OFTEN_OVER = replace(SAMPLED, stop_token_ids=tuple(range(0, 50, 4)))
PENALISED = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=1.5)
FAULTS = {
    "rejected rows are kept": Case(engine_faults.keep_rejected_rows, trees, GREEDY),
    "rejected rows are kept, sampled": Case(engine_faults.keep_one_row_more, chain, SAMPLED, "chain_rejection"),
    "kept rows are not moved": Case(engine_faults.no_move, trees, GREEDY),
    "nodes see their siblings": Case(engine_faults.see_siblings, trees, GREEDY),
    "positions in row order": Case(engine_faults.positions_in_row_order, trees, GREEDY),
    "penalties forget the path": Case(engine_faults.blind_to_the_path, trees, PENALISED),
    "a path runs past the end": Case(engine_faults.no_cut, chain, OFTEN_OVER, "chain_rejection"),
    "noise not keyed by position": Case(engine_faults.noise_of_the_step, trees, SAMPLED, "gumbel"),
    "the context is not seen": Case(engine_faults.forget_the_context, trees, SAMPLED),
    "q not the law drawn from": Case(
        nothing, lambda: Spoiled("3", q_transformed_after_drawing), SAMPLED, "chain_rejection", 200
    ),
    "q not the law drawn from, block": Case(
        nothing, lambda: Spoiled("3", q_transformed_after_drawing), SAMPLED, "block"
    ),
    "sampled drafts are pruned": Case(
        nothing, lambda: Spoiled("1", pruned_by_confidence), SAMPLED, "chain_rejection", 200
    ),
    "sampled trees are pruned": Case(
        nothing, lambda: Spoiled("sampled:2", weaker_child_dropped), SAMPLED, "recursive_without_replacement", 200
    ),
    "sampled trees are pruned, traversal": Case(
        nothing, lambda: Spoiled("sampled:2", weaker_child_dropped), SAMPLED, "traversal", 200
    ),
    "sampled trees are reordered": Case(
        nothing, lambda: Spoiled("sampled:2", likelier_child_first), SAMPLED, "recursive_without_replacement", 200
    ),
    "i.i.d. draws are pruned": Case(nothing, lambda: TwoDraws(weaker_child_dropped), SAMPLED, "recursive_iid", 200),
    "equal draws are merged": Case(nothing, lambda: TwoDraws(equal_draws_merged), SAMPLED, "recursive_iid", 200),
    "temperature 0 not a one-hot": Case(greedy_is_not_one_hot, chain, GREEDY),
    "p not transformed": Case(target_not_transformed, chain, SAMPLED, "chain_rejection"),
    "a residual not renormalised": Case(residual_not_renormalised, chain, SAMPLED, "chain_rejection"),
    "a residual transformed again": Case(residual_transformed_again, chain, SAMPLED, "chain_rejection"),
    "corrections drawn from p": Case(correction_from_p, chain, SAMPLED, "chain_rejection"),
    "the wrong temperature": Case(half_a_temperature, chain, SAMPLED, "chain_rejection"),
    "the bonus is dropped": Case(bonus_dropped, chain, SAMPLED, "chain_rejection"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_the_certificate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAULTS[name]
    drafter = case.drafter()
    case.plant(monkeypatch)
    found = certified(drafter, case.settings, rule=case.rule, samples=case.samples)
    assert found.verdict == "failed", found.as_dict()
    assert found.reason.startswith("no certificate: ")


def test_draws_that_are_left_alone_are_certified() -> None:
    found = certified(TwoDraws(unspoiled), SAMPLED, rule="recursive_iid", samples=200)
    assert found.verdict == "certified", found.as_dict()


def test_what_no_law_shows_is_found_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    accepts_at_equality(monkeypatch)
    found = certified(draft_model("3"), SAMPLED, rule="chain_rejection")
    assert [each.test for each in found.failures] == ["uniform 0"]
    (failure,) = found.failures
    assert failure.figures["forbidden"][0]["gap"] > failure.figures["forbidden"][0]["rounding"]


def test_a_difference_is_told_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_faults.no_move(monkeypatch)
    found = certified(RandomTrees(4, KNOWN), GREEDY)
    (greedy,) = found.findings
    worst = max(greedy.figures["partings"], key=lambda parting: parting["gap"] or 0)
    assert worst["gap"] > worst["rounding"]
    assert not worst["tie"]
    assert greedy.control is None  # there is nothing left to refuse
