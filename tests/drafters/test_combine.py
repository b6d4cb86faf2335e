from __future__ import annotations

import random
import time
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.combine import RANKS, Combine, Options, Proposal, Record, merge, pairs
from forerun.drafters.confidence import logs_of
from forerun.drafters.drafter import Budget, Checked, Expects, Observation, PutsOff
from forerun.drafters.find import make_drafter, read_options
from forerun.drafters.suffix import Suffix
from tests.drafters.contract import live
from tests.drafters.models import paths_of, sequence, setup
from tests.drafters.test_text import engine, requests
from tests.engine.tiny import drain

Path = tuple[int, ...]


class Says:
    """Proposes the same paths for every text, and notes what it is asked and told."""

    drawing = Drawing.FIXED
    branches = True

    def __init__(self, *paths: Path, layers: tuple[int, ...] = (), top: int = 0) -> None:
        self.paths = paths
        self.layers, self.top = layers, top
        self.asked: list[list[int]] = []
        self.told: list[Observation] = []
        self.forgotten: list[int] = []

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        self.asked.append([one.id for one in sequences])
        roots = [one.tokens[-1] for one in sequences]
        cut = [[path[: min(budget.depth, budget.nodes)] for path in self.paths] for budget in budgets]
        return DraftTree.from_paths(roots, cut, torch.tensor([one.position for one in sequences]), Drawing.FIXED)

    def observe(self, observations: Many[Observation]) -> None:
        self.told += observations

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.id)


class Knows(Says):
    """Says the chance of each node, which is the same for all of them."""

    def __init__(self, *paths: Path, chance: float) -> None:
        super().__init__(*paths)
        self.chance = chance

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        tree = super().draft(sequences, budgets)
        return replace(tree, log_values=logs_of([[1.0, *[self.chance] * (tree.size - 1)] for _ in sequences]))


def combine(first: Says, second: Says, **options: Any) -> Combine:
    return Combine(first, second, Options(**options))


def text(number: int = 0) -> Sequence:
    return Sequence([5, 6], 100, id=number)


# --- options ---------------------------------------------------------------------------------------------------


def test_options_of_the_two() -> None:
    assert pairs("x", "") == {}
    assert read_options("recycling", pairs("x", "prompt=false,top=4")).prompt is False
    assert pairs("x", "tokens=8, max_match=3") == {"tokens": "8", "max_match": "3"}
    assert pairs("x", "model=a=b,tree=fixed:3, 2,1,top=2") == {"model": "a=b", "tree": "fixed:3,2,1", "top": "2"}
    made = make_drafter(
        "combine",
        setup(),
        {"second": "draft_model", "first_options": "tokens=3", "second_options": "model=x,tree=dynamic:2,3,6"},
    )
    assert isinstance(made, Combine)
    assert isinstance(made.first.drafter, Suffix)
    assert made.first.drafter.options.tokens == 3
    assert made.branches


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"first": "combine"}, "cannot combine itself: name two other"),
        ({"second": "eegle"}, "no drafter 'eegle': use one of"),
        ({"mode": "both"}, "mode is 'both': write"),
        ({"tokens": 65}, "tokens is 65: give a whole number from 0 to 64"),
        ({"threshold": -1}, "threshold is -1: give a number from 0 to 100"),
        ({"min_confidence": 1.5}, "min_confidence is 1.5: give a number from 0 to 1"),
        ({"first_options": "tokens"}, "first_options is 'tokens': write options as in"),
        ({"first_options": "token=3"}, "suffix has no option 'token': it has tokens"),
        ({"second": "ngram", "second_options": "tokens=x"}, "tokens is 'x': give a whole number"),
        ({"second": "draft_model", "second_options": "tree=x"}, "the tree 'x' is not understood"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)


@pytest.mark.parametrize("place", ["first", "second"])
def test_sampled_trees_are_refused(place: str) -> None:
    options = {"first": "ngram", "second": "ngram", place: "draft_model", f"{place}_options": "model=x,tree=3,2"}
    with pytest.raises(ValueError, match=f"draft_model would sample: ask it .* {place}_options=tree=fixed"):
        make_drafter("combine", setup(), options)


def test_chains_stay_chains_unless_merged() -> None:
    options = {"first": "ngram", "second": "ngram", "second_options": "min_match=1"}
    assert not make_drafter("combine", setup(), {**options, "mode": "confident"}).branches
    assert make_drafter("combine", setup(), options).branches


# --- merging ---------------------------------------------------------------------------------------------------


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    tokens, parents, values = [9], [-1], [1.0]
    for node in range(1, 1 + draw(st.integers(0, 6))):
        parent, token = draw(st.integers(0, node - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(min(parent, len(parents) - 1))
            tokens.append(token)
            values.append(values[parents[-1]] * draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])))
    return Proposal(tokens, parents, values)


def by_path(proposal: Proposal) -> dict[Path, float]:
    paths: list[Path] = [()]
    for token, parent in zip(proposal.tokens[1:], proposal.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    values: dict[Path, float] = {}
    for path, value in zip(paths, proposal.values, strict=True):
        values[path] = max(value, values.get(path, 0.0))
    return values


@given(first=proposals(), second=proposals(), nodes=st.integers(-1, 9), least=st.sampled_from([0.0, 0.2]))
def test_merging_keeps_the_most_valuable_nodes(first: Proposal, second: Proposal, nodes: int, least: float) -> None:
    union = by_path(first)
    for path, value in by_path(second).items():
        union[path] = max(value, union.get(path, 0.0))
    worth = sorted((value for path, value in union.items() if path and value >= least), reverse=True)
    merged = merge([first, second], nodes, least)
    found = by_path(merged)
    assert len(found) == len(merged.tokens) == 1 + min(max(0, nodes), len(worth))
    assert sorted((value for path, value in found.items() if path), reverse=True) == worth[: max(0, nodes)]
    assert all(union[path] == value for path, value in found.items())
    assert all(parent < node for node, parent in enumerate(merged.parents))


def test_both_in_one_tree_under_one_budget() -> None:
    first, second = Knows((1, 2, 3), chance=0.9), Knows((1, 4), (7,), chance=0.3)
    made = combine(first, second)
    assert set(paths_of(made.draft([text()], [Budget(64, 64)]), 0)) == {(), (1,), (1, 2), (1, 2, 3), (1, 4), (7,)}
    assert paths_of(made.draft([text()], [Budget(4, 64)]), 0)[:4] == [(), (1,), (1, 2), (1, 2, 3)]
    assert made.draft([text()], [Budget(4, 64)]).size == 5
    assert combine(first, second, tokens=2).draft([text()], [Budget(64, 64)]).size == 3
    assert combine(first, second, min_confidence=0.5).draft([text()], [Budget(64, 64)]).size == 4
    assert combine(first, second, min_confidence=1.0).draft([text()], [Budget(64, 64)]).size == 1


# --- confidence ------------------------------------------------------------------------------------------------


def test_the_second_is_asked_only_where_the_first_is_unsure() -> None:
    sure, unsure = Knows((1, 2, 3), chance=0.9), Knows((1, 2, 3), chance=0.1)
    second = Knows((8, 9), chance=0.5)
    tree = combine(sure, second, mode="confident").draft([text()], [Budget(9, 9)])
    assert second.asked == []
    assert paths_of(tree, 0)[-1] == (1, 2, 3)
    made = combine(unsure, second, mode="confident")
    tree = made.draft([text(0), text(1), text(2)], [Budget(9, 9), Budget(0, 0), Budget(9, 9)])
    assert second.asked == [[0, 2]]  # nothing can be drafted for the other
    assert [paths_of(tree, row)[-1] for row in range(3)] == [(8, 9), (), (8, 9)]
    weak = Knows((8, 9), chance=0.06)
    assert paths_of(combine(unsure, weak, mode="confident").draft([text()], [Budget(9, 9)]), 0)[-1] == (1, 2, 3)


def test_a_second_that_fails_is_asked_less() -> None:
    first, second = Knows((1,), chance=0.6), Says((8, 9))
    made = combine(first, second, mode="confident")
    one = text()
    for _ in range(60):
        made.draft([one], [Budget(9, 9)])
        one.commit([1])
        made.observe([Observation(one, [1], {}, one.position - 1)])
    assert 0 < len(second.asked) < 30  # as soon as it promises less than the first
    assert made.second.record.accepted < 0.6


def test_what_a_drafter_is_worth_is_measured() -> None:
    chosen, record = random.Random(0), Record()
    proposal = Proposal([9, 1, 2, 3], [-1, 0, 0, 1], [1.0] * 4)
    for _ in range(4000):
        record.learn(proposal, chosen.choices([[1, 3], [1, 4], [2, 3], [5]], [0.3, 0.1, 0.2, 0.4])[0])
    assert record.values(proposal.parents) == pytest.approx([1.0, 0.4, 0.2, 0.3], abs=0.15)
    assert record.accepted == pytest.approx(0.3 * 2 + 0.1 + 0.2, abs=0.2)
    before, accepted = [list(row) for row in record.chances], record.accepted
    record.learn(Proposal([9], [-1], [1.0]), [1])  # nothing was proposed: that yields nothing, and no rank was wrong
    assert record.accepted < accepted
    assert record.chances == before


@given(st.lists(st.integers(0, 100), max_size=40))
def test_measured_values_never_rise_along_a_path(numbers: list[int]) -> None:
    parents = [-1, *(number % node for node, number in enumerate(numbers, start=1))]
    values = Record().values(parents)
    assert all(values[node] <= values[parent] for node, parent in enumerate(parents[1:], start=1))
    assert len(Record().chances[0]) == RANKS


# --- both are told -----------------------------------------------------------------------------------------------


def test_each_sees_what_it_asked_for() -> None:
    first, second = Says((1,), layers=(4, 2), top=3), Says((2,), layers=(2, 7))
    made = combine(first, second)
    assert made.layers == (2, 4, 7)
    assert made.top == 3
    one = text()
    checked = Checked([6, 1], [-1, 0], torch.arange(6).view(2, 3))
    features = {layer: torch.full((1, 2), layer) for layer in made.layers}
    made.observe([Observation(one, [6], features, 1, checked)])
    assert set(first.told[0].features) == {2, 4}
    assert set(second.told[0].features) == {2, 7}
    assert second.told[0].checked is None
    assert first.told[0].checked is not None
    assert torch.equal(first.told[0].checked.top, checked.top)
    narrow = Says((1,), top=1)
    combine(narrow, first).observe([Observation(one, [6], features, 1, checked)])
    assert narrow.told[0].checked is not None
    assert narrow.told[0].checked.top.tolist() == [[0], [3]]
    made.forget(one)
    assert first.forgotten == second.forgotten == [0]


# --- any two -----------------------------------------------------------------------------------------------------

PAIRS: list[dict[str, Any]] = [
    {"mode": mode, **chosen}
    for mode in ("merge", "confident")
    for chosen in (
        {"first": "ngram", "second": "suffix"},
        {"second": "draft_model", "second_options": "model=other,tree=fixed:2,2"},
        {"first": "ngram", "second": "draft_model", "second_options": "model=same,tree=dynamic:2,3,5"},
        {"second": "none"},
        {"min_confidence": 0, "tokens": 40},
    )
]


@pytest.mark.parametrize("options", PAIRS)
def test_the_contract_holds_for_any_two(options: dict[str, Any]) -> None:
    live(make_drafter("combine", setup(), options), steps=12, seed=3)


@pytest.mark.parametrize("options", PAIRS)
def test_the_text_does_not_depend_on_the_pair(options: dict[str, Any]) -> None:
    plain = drain(engine("none", {}), requests())
    assert drain(engine("combine", options, slots=200), requests()) == plain


def test_what_the_second_expects_is_expected_of_both() -> None:
    """As long as it would draft as much as there may be."""
    recycling = make_drafter("recycling", setup(), {})
    assert isinstance(recycling, Expects)
    both = make_drafter("combine", setup(), {})
    assert isinstance(both, Expects)
    assert both.gain(0) == 0 < both.gain(2) < both.gain(15) == both.gain(None) == recycling.gain(15)
    fewer = make_drafter("combine", setup(), {"tokens": 4})
    assert isinstance(fewer, Expects)
    assert fewer.gain(None) == fewer.gain(4) == recycling.gain(4)
    for options in ({"second": "ngram"}, {"second_options": "nodes=4"}):
        other = make_drafter("combine", setup(), options)
        assert isinstance(other, Expects)
        assert other.gain(None) == 0


def test_what_the_two_had_put_off_is_told_once() -> None:
    made = make_drafter("combine", setup(), {})
    assert isinstance(made, PutsOff)
    assert made.late() == 0
    made.draft([text()], [Budget(8, 8)])
    assert made.late() > 0
    assert made.late() == 0


def test_time_is_printed() -> None:
    one = sequence(1, length=3000)
    drafter = make_drafter("combine", setup(), {"second": "ngram", "second_options": "candidates=3,min_match=1"})
    spent = []
    for step in range(100):
        one.commit([*one.tokens[-400:-397], step % 40])
        start = time.process_time()
        drafter.draft([one], [Budget(16, 16)])
        drafter.observe([Observation(one, one.tokens[-4:], {}, one.position - 4)])
        spent.append(time.process_time() - start)
    print(f"combine, suffix and ngram: {sorted(spent)[50] * 1e6:.0f} µs a step")
