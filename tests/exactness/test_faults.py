"""The guard is guarded: each fault that real code is known to make is planted, and a check of the proof must fail.

`docs/faults.md` tells the same list in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.law import LawSettings, law
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree
from forerun.core.verdict import Verdict
from forerun.verify.plain import PlainNoise, PlainTree, PlainVerdict, Row, draw, mass, positive
from forerun.verify.rejection import SampledRemainder, reject_down
from forerun.verify.rule import BatchNoise, VerificationRule, all_rules

from .checks import check_empty_residual, check_everything_commits, check_law, check_zero_uniform, equal_pair
from .toy import Draft, Replay, State, Text, ToyEngine, ToyPair

RULES = all_rules()
TREE = TreeShape.from_rank_paths([(0,), (1,), (0, 0)])
CHAIN = TreeShape.chain(2)


@dataclass
class Unguarded(ToyEngine):
    """Without the comparison of batched and plain form, so that the law alone has to betray the fault."""

    def compare(self, tree: DraftTree, p: Tensor, replays: list[Replay]) -> None:
        pass


# --- 1: rejected entries stay in a cache


class TargetKeepsRejectedEntries(Unguarded):
    def entries_kept(self, tree: PlainTree, verdict: PlainVerdict) -> tuple[Text, Text]:
        kept, drafter = super().entries_kept(tree, verdict)
        rejected = tuple(t for node, t in enumerate(tree.tokens) if node and node not in verdict.path)
        return (*kept, *rejected), drafter


class DrafterKeepsRejectedEntries(Unguarded):
    def entries_kept(self, tree: PlainTree, verdict: PlainVerdict) -> tuple[Text, Text]:
        kept, _ = super().entries_kept(tree, verdict)
        return kept, (*kept, 1)


# --- 2: q computed again after drafting


class RecomputesQ(Unguarded):
    def recorded_law(self, which: str, seen: Text, path: Text) -> Row:
        return self.drafter_law(which, (*seen, 1), path)  # from a cache that has moved on


# --- 3: transforms


class TargetIsNotTransformed(Unguarded):
    def target_law(self, seen: Text, path: Text) -> Row:
        return replace(self, params=SamplingParams(), _laws={}, _steps={})._law("target", seen, path)


class DrafterIsTransformedAfterDrawing(Unguarded):
    def drafter_law(self, which: str, seen: Text, path: Text) -> Row:
        return replace(self, params=SamplingParams(), _laws={}, _steps={})._law(which, seen, path)

    def recorded_law(self, which: str, seen: Text, path: Text) -> Row:
        return self._law(which, seen, path)


class GreedyIsNotOneHot(Unguarded):
    def target_law(self, seen: Text, path: Text) -> Row:
        return replace(self, params=SamplingParams(temperature=1.0), _laws={}, _steps={})._law("target", seen, path)


def transforms_the_residual_again(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    path: list[int] = []
    node = 0
    while tree.children[node]:
        drawn = tree.children[node][0]
        x, q = tree.tokens[drawn.child], tree.law(drawn)
        if not noise.accept(node) * float(q[x]) < float(p[node][x]):
            residual = torch.from_numpy(positive(p[node] - q))
            again = law(residual.log()[None], LawSettings.of([SamplingParams(temperature=0.4)]))
            return PlainVerdict(tuple(path), draw(again[0].numpy(), noise.final(len(path))))
        node = drawn.child
        path.append(node)
    return PlainVerdict(tuple(path), draw(p[node], noise.final(len(path))))


# --- 4: bonus and residual


class DropsTheBonus(Unguarded):
    def committed(self, tree: PlainTree, verdict: PlainVerdict) -> Text:
        tokens = super().committed(tree, verdict)
        at_a_leaf = bool(verdict.path) and not tree.children[verdict.path[-1]]
        return tokens[:-1] if at_a_leaf else tokens


def does_not_renormalise(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    remainder = p[0]
    for k, drawn in enumerate(tree.children[0]):
        x, q = tree.tokens[drawn.child], tree.law(drawn)
        if noise.accept(0, k) * float(q[x]) < float(remainder[x]):  # the scale is missing
            return PlainVerdict((drawn.child,), draw(p[drawn.child], noise.final(1)))
        left = positive(remainder - q)
        remainder = left if mass(left) > 0 else remainder
    return PlainVerdict((), draw(remainder, noise.final(0)))


def does_not_guard_the_residual(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    drawn = tree.children[0][0]
    x, q = tree.tokens[drawn.child], tree.law(drawn)
    if noise.accept(0) * float(q[x]) < float(p[0][x]):
        return PlainVerdict((drawn.child,), draw(p[drawn.child], noise.final(1)))
    return PlainVerdict((), draw(positive(p[0] - q), noise.final(0)))


# --- 5: a sampled tree is pruned or reranked


class PrunesByConfidence(Unguarded):
    def prune(self, draft: Draft) -> Draft:
        """Drop whichever of the root's two children q finds less likely, with all that hangs below it."""
        first, second = self.shape.children[0]
        weaker = first if draft.q[0][draft.tokens[first]] < draft.q[0][draft.tokens[second]] else second
        present = list(draft.present)
        for node in range(1, self.shape.size):
            present[node] = present[node] and node != weaker and present[self.shape.parents[node]]
        return replace(draft, present=present)


class ReordersByConfidence(Unguarded):
    def prune(self, draft: Draft) -> Draft:
        """Put the more likely of two children first, whichever was drawn first."""
        first, second = self.shape.children[0]
        tokens = list(draft.tokens)
        if draft.q[0][tokens[first]] < draft.q[0][tokens[second]]:
            tokens[first], tokens[second] = tokens[second], tokens[first]
        return replace(draft, tokens=tokens)


class MergesDrawsOfEqualTokens(Unguarded):
    """One round for a token that was drawn twice."""

    def prune(self, draft: Draft) -> Draft:
        first, second = self.shape.children[0]
        present = list(draft.present)
        present[second] = draft.tokens[first] != draft.tokens[second]
        return replace(draft, present=present)


# --- 6: u <= p/q


def accepts_at_equality(tree: PlainTree, p: list[Row], noise: PlainNoise) -> PlainVerdict:
    drawn = tree.children[0][0]
    x, q = tree.tokens[drawn.child], tree.law(drawn)
    if noise.accept(0) * float(q[x]) <= float(p[0][x]):
        return PlainVerdict((drawn.child,), draw(p[drawn.child], noise.final(1)))
    return PlainVerdict((), draw(positive(p[0] - q), noise.final(0)))


# --- 7: penalties look at the committed text only


class PenaltiesForgetThePath(Unguarded):
    def target_law(self, seen: Text, path: Text) -> Row:
        table = self.pair.target[self._sum((*seen, *path))]
        committed = ToyPair((table,) * self.pair.vocabulary, self.pair.drafter, self.pair.second)
        return replace(self, pair=committed, _laws={}, _steps={})._law("target", seen, ())


# --- 8: the text runs past its end


class RunsPastTheEnd(Unguarded):
    def commit(self, sequence: Sequence, tokens: Text) -> None:
        sequence.output.extend(tokens)
        if set(sequence.output) & sequence.eos or len(sequence.output) >= sequence.max_tokens:
            sequence.finish_reason = "stop"


# --- 9: half precision


class HalfPrecision(Unguarded):
    def target_law(self, seen: Text, path: Text) -> Row:
        return super().target_law(seen, path).astype(np.float16).astype(np.float64)


# --- the list


def planted(reference: Callable[[PlainTree, list[Row], PlainNoise], PlainVerdict], name: str) -> VerificationRule:
    return replace(RULES[name], reference=reference)


PLAIN, COOL = SamplingParams(), SamplingParams(temperature=0.4)
PENALISED = SamplingParams(presence_penalty=2.0, frequency_penalty=1.0)
IID, WITHOUT = Drawing.IID, Drawing.WITHOUT_REPLACEMENT
CHAIN_RULE, TREE_RULE = RULES["chain_rejection"], RULES["recursive_iid"]
WITHOUT_RULE, FIXED_RULE = RULES["recursive_without_replacement"], RULES["recursive_fixed"]
Setup = tuple[VerificationRule, Drawing, TreeShape, SamplingParams]

LAW_FAULTS: dict[str, tuple[type[ToyEngine], Setup]] = {
    "1 target keeps rejected entries": (TargetKeepsRejectedEntries, (CHAIN_RULE, IID, CHAIN, PLAIN)),
    "1 the same with a tree": (TargetKeepsRejectedEntries, (FIXED_RULE, Drawing.FIXED, TREE, PLAIN)),
    "2 q computed again": (RecomputesQ, (CHAIN_RULE, IID, CHAIN, PLAIN)),
    "2 the same, block verification": (RecomputesQ, (RULES["block"], IID, CHAIN, PLAIN)),
    "3 p not transformed": (TargetIsNotTransformed, (CHAIN_RULE, IID, CHAIN, COOL)),
    "3 q transformed after drawing": (DrafterIsTransformedAfterDrawing, (CHAIN_RULE, IID, CHAIN, COOL)),
    "3 temperature 0 not a one-hot": (
        GreedyIsNotOneHot,
        (CHAIN_RULE, IID, CHAIN, SamplingParams(temperature=0)),
    ),
    "3 residual transformed again": (
        Unguarded,
        (planted(transforms_the_residual_again, "chain_rejection"), IID, CHAIN, COOL),
    ),
    "4 residual not renormalised": (
        Unguarded,
        (planted(does_not_renormalise, "recursive_iid"), IID, TreeShape((-1, 0, 0)), PLAIN),
    ),
    "5 sampled tree pruned": (PrunesByConfidence, (WITHOUT_RULE, WITHOUT, TREE, PLAIN)),
    "5 sampled tree pruned, i.i.d.": (PrunesByConfidence, (TREE_RULE, IID, TREE, PLAIN)),
    "5 sampled tree pruned, traversal": (PrunesByConfidence, (RULES["traversal"], WITHOUT, TREE, PLAIN)),
    "5 sampled tree reordered": (ReordersByConfidence, (WITHOUT_RULE, WITHOUT, TreeShape((-1, 0, 0)), PLAIN)),
    "5 equal draws merged into one": (MergesDrawsOfEqualTokens, (TREE_RULE, IID, TreeShape((-1, 0, 0)), PLAIN)),
    "7 penalties forget the path": (PenaltiesForgetThePath, (CHAIN_RULE, IID, CHAIN, PENALISED)),
    "8 text runs past its end": (RunsPastTheEnd, (CHAIN_RULE, IID, CHAIN, PLAIN)),
    "9 half precision": (HalfPrecision, (CHAIN_RULE, IID, CHAIN, PLAIN)),
}


def is_caught(engine: ToyEngine) -> bool:
    try:
        check_law(engine, 3, eos=frozenset({2}))
    except (AssertionError, ValueError):  # a wrong law, or one that the tree itself refuses
        return True
    return False


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_the_law_betrays(fault: str) -> None:
    faulty, setup = LAW_FAULTS[fault]
    pair = ToyPair.random(3, seed=21)
    if setup[0] in RULES.values():
        assert not is_caught(ToyEngine(pair, *setup)), "without the fault all is well"
    assert is_caught(faulty(pair, *setup))


def test_a_drafter_that_keeps_rejected_entries_only_loses_speed() -> None:
    """1, the drafter's side: it still draws from the q it writes down, so the law holds; what it commits falls."""
    setup: Setup = (CHAIN_RULE, IID, CHAIN, PLAIN)
    pair = equal_pair(3, seed=5)
    check_law(DrafterKeepsRejectedEntries(pair, *setup), 3)
    right = ToyEngine(pair, *setup)
    for engine, everything in ((right, True), (DrafterKeepsRejectedEntries(pair, *setup), False)):
        first = next(step for step in engine.step(State.start((0,))) if len(step.tokens) == 3)
        second = State((0, *first.tokens), first.target_entries, first.drafter_entries)
        tokens = sum(step.probability * len(step.tokens) for step in engine.step(second))
        assert (abs(tokens - 3) < 1e-9) is everything


def test_a_dropped_bonus_is_missed() -> None:
    """4: the law stays right and a token per step is lost, so the count has to tell."""
    setup: Setup = (CHAIN_RULE, IID, CHAIN, PLAIN)
    check_everything_commits(ToyEngine(equal_pair(3, seed=5), *setup))
    with pytest.raises(AssertionError):
        check_everything_commits(DropsTheBonus(equal_pair(3, seed=5), *setup))


def test_an_unguarded_residual_is_seen() -> None:
    """4: rounding can reject although p = q; then nothing is left to draw from."""
    with pytest.raises(AssertionError):
        check_empty_residual(planted(does_not_guard_the_residual, "chain_rejection"), IID)


def test_acceptance_at_equality_is_seen() -> None:
    """6: u = 0 has no length, so no law shows it; one number does."""
    with pytest.raises(AssertionError):
        check_zero_uniform(planted(accepts_at_equality, "chain_rejection"), IID)


def test_a_fault_in_a_batched_form_is_seen() -> None:
    """The batched form is replayed at every outcome of the reference: forgetting that refused tokens leave q shows."""

    def keeps_refused_tokens(tree: DraftTree, p: Tensor, noise: BatchNoise) -> Verdict:
        return reject_down(tree, SampledRemainder.start(tree, p, exhaust=False), noise)

    setup: Setup = (WITHOUT_RULE, WITHOUT, TREE, PLAIN)
    pair = ToyPair.random(3, seed=21)
    assert not is_caught(ToyEngine(pair, *setup))
    assert is_caught(ToyEngine(pair, replace(WITHOUT_RULE, batched=keeps_refused_tokens), *setup[1:]))


def test_the_page_names_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    names = {name for name in globals() if name.startswith("test_")} - {"test_the_page_names_every_fault"}
    missing = [name for name in [*names, *LAW_FAULTS] if name not in page]
    assert not missing, f"docs/faults.md says nothing of {missing}"
