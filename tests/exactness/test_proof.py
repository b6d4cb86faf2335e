"""The proof: what a rule commits has exactly the target's law.

For every rule × drawing × tree shape × law setting the law of the committed text is computed by enumeration, all
drafts and all outcomes of the rule, and compared with the target's. The batched form is replayed at every outcome.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.verify.rule import all_rules, lossless_rules

from .cases import SETTINGS, STARS, Case, all_cases, fits, star, tree_shapes
from .checks import check_empty_residual, check_everything_commits, check_law, check_zero_uniform, equal_pair
from .toy import ToyPair, Weights
from .worlds import NeedsRaceError

Record = Callable[[str, object], None]


def enumerated_cases() -> list[Case]:
    return [case for case in all_cases() if case.rule.name != "gumbel"]


def text_length(case: Case) -> int:
    """Up to three steps; where penalties make every text its own context, large trees get two."""
    return 2 if SETTINGS[case.setting].penalises and case.shape.size > 3 else 3


def vocabulary(case: Case) -> int:
    """As many tokens as the number of drafts allows."""
    return {1: 5, 2: 5, 3: 5, 4: 4}.get(case.shape.size, 3)


@pytest.mark.parametrize("case", enumerated_cases(), ids=str)
def test_the_text_has_the_targets_law(case: Case, record_property: Record) -> None:
    pair = ToyPair.random(vocabulary(case), seed=7)
    record_property("exactness", check_law(case.engine(pair), text_length(case)))


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("setting", ["plain", "top_p"])
@pytest.mark.parametrize("name", sorted({case.rule.name for case in enumerated_cases()}))
def test_more_laws_over_larger_vocabularies(
    name: str, setting: str, seed: int, size: int, record_property: Record
) -> None:
    for shape in ("chain0", "static0"):
        for drawing in Drawing:
            case = Case(all_rules()[name], drawing, shape, setting)
            if fits(case.rule, drawing, case.shape, setting):
                record_property("exactness_extra", check_law(case.engine(ToyPair.random(size, seed)), 2))


def weights(size: int) -> st.SearchStrategy[Weights]:
    """Small whole numbers: zeros, ties and one-hots are common, and failures shrink well."""
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any)
    rows = st.lists(row, min_size=size, max_size=size)
    return rows.map(lambda table: tuple(tuple(float(weight) for weight in line) for line in table))


@st.composite
def pairs(draw: st.DrawFn) -> ToyPair:
    target, drafter, second = (draw(weights(3)) for _ in range(3))
    kind = draw(st.sampled_from(["free", "free", "equal", "disjoint"]))
    if kind == "equal":
        drafter = target
    elif kind == "disjoint":
        drafter = tuple(
            tuple(float(w == 0) for w in row) if 0.0 in row else other
            for row, other in zip(target, drafter, strict=True)
        )
    return ToyPair(target, drafter, second)


RULE_DRAWINGS = sorted({(case.rule.name, case.drawing.value) for case in enumerated_cases()})


@pytest.mark.parametrize(("rule", "drawing"), RULE_DRAWINGS)
def test_any_laws(rule: str, drawing: str, record_property: Record) -> None:
    """Hypothesis looks for laws, shapes and settings that break a rule."""
    small = {name: shape for name, shape in tree_shapes().items() if shape.size <= 4}
    stars = {} if drawing == "without_replacement" else {name: star(*STARS[name]) for name in ("paths2x1", "paths2x2")}
    names = [
        (name, setting)
        for name, shape in {**small, **stars}.items()
        for setting in SETTINGS
        if fits(all_rules()[rule], Drawing(drawing), shape, setting)
    ]

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(pairs(), st.sampled_from(names))
    def search(pair: ToyPair, place: tuple[str, str]) -> None:
        case = Case(all_rules()[rule], Drawing(drawing), *place)
        record_property("exactness_extra", check_law(case.engine(pair), 2))

    search()


def test_every_lossless_rule_is_enumerated_or_compared_with_plain_sampling() -> None:
    """A rule leaves the enumeration only by asking for Gumbel noise, and then test_gumbel.py has it."""
    left_out = {case.rule.name for case in all_cases()} - {case.rule.name for case in enumerated_cases()}
    assert left_out == {"gumbel"}
    case = next(case for case in all_cases() if case.rule.name == "gumbel")
    with pytest.raises(NeedsRaceError):
        case.engine(ToyPair.random(3, 0)).error(2)
    assert {case.rule.name for case in all_cases()} == {n for n, rule in all_rules().items() if rule.lossless}
    assert {case.shape_name for case in all_cases()} == {*tree_shapes(), *STARS}


@pytest.mark.parametrize("rule", ["chain_rejection", "block", "traversal", "recursive_iid", "k_seq"])
def test_equal_laws_commit_everything(rule: str) -> None:
    case = Case(all_rules()[rule], Drawing.IID, "chain0", "plain")
    check_everything_commits(case.engine(equal_pair(3, seed=5)))


@pytest.mark.parametrize(
    ("rule", "drawing"),
    [(name, d) for d in Drawing for name in lossless_rules(d, chain=True, greedy=True)],
)
def test_a_uniform_of_zero_accepts_nothing_impossible(rule: str, drawing: Drawing) -> None:
    check_zero_uniform(all_rules()[rule], drawing)


@pytest.mark.parametrize("rule", ["chain_rejection", "recursive_iid", "recursive_without_replacement", "k_seq"])
def test_an_empty_residual_falls_back_to_p(rule: str) -> None:
    drawing = next(iter(sorted(all_rules()[rule].drawings, key=lambda d: d.value)))
    check_empty_residual(all_rules()[rule], drawing)


def test_typical_acceptance_is_lossy_and_its_batched_form_agrees() -> None:
    """The one lossy rule: the enumeration sees the difference, so it would see one in any other."""
    worst = 0.0
    for case in all_cases(lossless=False):
        if case.shape.size <= 4 and case.setting in ("plain", "cool"):
            worst = max(worst, case.engine(ToyPair.random(3, seed=3)).error(2))
    assert worst > 0.05


@pytest.mark.parametrize("length", [1, 2, 3])
def test_texts_end_where_plain_decoding_ends_them(length: int, record_property: Record) -> None:
    """EOS and max_tokens inside an accepted path."""
    for case in all_cases():
        wanted = case.rule.name in ("block", "recursive_fixed", "traversal")
        if wanted and case.setting == "plain" and case.shape.size <= 4:
            error = check_law(case.engine(ToyPair.random(3, seed=11)), length, eos=frozenset({1}))
            record_property("exactness_extra", error)
