"""The proof with grammars: masks in the state of each node, pruned drafts and forced tokens leave the law alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.engine.grammar_trees import Room, _Draws
from forerun.engine.grammar_walk import Walk
from forerun.verify.rule import all_rules

from .cases import SETTINGS, Case, all_cases
from .checks import TOLERANCE, check_law
from .grammars import GRAMMARS, GrammarToyEngine, MergedGrammarToyEngine, WithGrammar
from .toy import ToyPair

Plant = Callable[[pytest.MonkeyPatch], None]
Record = Callable[[str, object], None]


def engine(case: Case, grammar: str, more: int = 2, seed: int = 7) -> WithGrammar:
    """There is room for `more` nodes and levels than the drafter drafts."""
    kind = MergedGrammarToyEngine if case.merged else GrammarToyEngine
    made = kind(ToyPair.random(4, seed), case.rule, case.drawing, case.shape, SETTINGS[case.setting])
    made.grammar = GRAMMARS[grammar]
    made.room = Room(case.shape.size - 1 + more, case.shape.depth + more)
    return made


SHAPES = ("chain0", "static0", "paths2x1", "paths2x2")


def cases() -> list[Case]:
    """Every rule with every drawing, on chains and on trees; rules that look at no draw with one drawing of each
    kind."""
    found = []
    for case in all_cases():
        looks = case.rule.name not in ("greedy", "sample_match") or case.drawing in (Drawing.FIXED, Drawing.IID)
        if looks and case.setting == "plain" and case.rule.name != "gumbel" and case.shape_name in SHAPES:
            found.append(case)
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_text_has_the_masked_law(case: Case, record_property: Record) -> None:
    """Where there is room for what is forced, and where there is none."""
    for grammar in ("runs", "letters") if case.merged else GRAMMARS:
        record_property("exactness_extra", check_law(engine(case, grammar), 3))
    record_property("exactness_extra", check_law(engine(case, "runs", more=0, seed=3), 3))


def test_all_rules_drawings_and_shapes_are_there() -> None:
    lossless = {name for name, rule in all_rules().items() if rule.lossless}
    assert {case.rule.name for case in CASES} == lossless - {"gumbel", "greedy"}
    assert {case.drawing for case in CASES} == set(Drawing)
    assert {case.shape.is_chain for case in CASES} == {True, False}


@pytest.mark.parametrize("setting", ["greedy", "top_p", "penalties"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_other_settings(grammar: str, setting: str) -> None:
    for rule, drawing in (("recursive_fixed", Drawing.FIXED), ("traversal", Drawing.WITHOUT_REPLACEMENT)):
        judging = all_rules()["greedy" if setting == "greedy" else rule]
        check_law(engine(Case(judging, drawing, "chain0", setting), grammar), 3)


# --- planted faults ------------------------------------------------------------------------------------------------


def mask_of_the_root(patch: pytest.MonkeyPatch) -> None:
    mask = Walk.mask
    patch.setattr(Walk, "mask", lambda self, path: mask(self, ()))


def broken_draws_forgotten(patch: pytest.MonkeyPatch) -> None:
    """As if a draw that breaks the grammar had never been made."""

    def judge(self: _Draws, child: int, walk: Walk, known: list[int]) -> None:
        if walk.enter(self.tokens[child]):
            self._visit(child, walk, known)
            walk.leave()
        else:
            self._drop(child)
            self.kept.discard(child)

    patch.setattr(_Draws, "_judge", judge)


def forced_taken_unseen(patch: pytest.MonkeyPatch) -> None:
    """What is forced is kept without a look at the target's law."""
    mask = Walk.mask

    def only_the_forced(self: Walk, path: tuple[int, ...]) -> Tensor:
        allowed = mask(self, path)
        entered = sum(self.enter(token) for token in path)
        forced = self.forced_next()
        for _ in range(entered):
            self.leave()
        if forced:
            allowed = allowed.clone().fill_(False)
            allowed[forced[0]] = True
        return allowed

    patch.setattr(Walk, "mask", only_the_forced)


def forced_instead_of_broken(patch: pytest.MonkeyPatch) -> None:
    """The forced token is drafted only where what was drawn breaks the grammar: that depends on the draw."""
    force = _Draws._force

    def sometimes(self: _Draws, node: int, token: int) -> None:
        if token not in [self.tokens[child] for child, _ in self.draws[node]]:
            force(self, node, token)

    patch.setattr(_Draws, "_force", sometimes)


def forced_with_the_drafters_law(patch: pytest.MonkeyPatch) -> None:
    """The tree says that the forced token was drawn from the drafter's law."""
    patch.setattr(_Draws, "_row_of", lambda self, token: 0)


FAULTS = (
    mask_of_the_root,
    broken_draws_forgotten,
    forced_taken_unseen,
    forced_instead_of_broken,
    forced_with_the_drafters_law,
)


def spoiled(toy: WithGrammar) -> bool:
    """Whether the law is clearly off, or a token was kept behind which there is no law at all."""
    try:
        return toy.error(3) > 1e-3 > TOLERANCE
    except AssertionError:
        return True


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = []
    for rule, drawing in (("chain_rejection", Drawing.IID), ("traversal", Drawing.WITHOUT_REPLACEMENT)):
        case = Case(all_rules()[rule], drawing, "chain0", "plain")
        for grammar in GRAMMARS:
            found.append(spoiled(engine(case, grammar, seed=3)))
    assert any(found)
