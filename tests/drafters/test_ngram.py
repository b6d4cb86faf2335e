from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget
from forerun.drafters.ngram import PLACES, NGram, Options
from tests.drafters.models import paths_of, sequence


def text(tokens: list[int]) -> Sequence:
    return Sequence(tokens, 10_000)


def drafted(tree: DraftTree) -> set[tuple[int, ...]]:
    return set(paths_of(tree, 0))


def naive_copies(tokens: list[int], options: Options, length: int) -> list[list[int]]:
    """Compares everything with everything."""
    count, most = options.copies
    found: list[list[int]] = []
    for match in range(options.max_match, options.min_match - 1, -1):
        places = [
            end
            for end in range(len(tokens) - 1, match - 1, -1)
            if match <= len(tokens) and tokens[end - match : end] == tokens[len(tokens) - match :]
        ]
        for end in places[:PLACES]:
            copy: list[int] = []
            for _ in range(min(most, length)):
                copy.append([*tokens, *copy][end + len(copy)])
            if copy not in found and len(found) < count:
                found.append(copy)
    return found


def naive_tree(tokens: list[int], options: Options, budget: Budget) -> set[tuple[int, ...]]:
    length = min(budget.depth, budget.nodes)
    nodes: set[tuple[int, ...]] = {()}
    for copy in naive_copies(tokens, options, length) if length > 0 else []:
        for end in range(1, len(copy) + 1):
            if len(nodes) <= budget.nodes or tuple(copy[:end]) in nodes:
                nodes.add(tuple(copy[:end]))
            else:
                break
    return nodes


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    later=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    copies=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    budget=st.builds(Budget, st.integers(0, 12), st.integers(0, 6)),
)
def test_equals_a_naive_search(
    tokens: list[int],
    later: list[list[int]],
    lengths: tuple[int, int],
    copies: tuple[int, int],
    budget: Budget,
) -> None:
    shortest, more = lengths
    options = Options(tokens=copies[0], candidates=copies[1], min_match=shortest, max_match=shortest + more)
    drafter, one = NGram(options), text(tokens)
    for step in ([], *later):  # the index grows with the text
        one.commit(step)
        tree = drafter.draft([one], [budget])
        assert drafted(tree) == naive_tree(one.tokens, options, budget)
        assert tree.drawing is Drawing.FIXED


def test_the_latest_of_the_longest_matches_is_copied() -> None:
    tokens = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 8, 1, 2, 3]
    one = NGram(Options(tokens=2, min_match=1)).draft([text(tokens)], [Budget(8, 8)])
    assert drafted(one) == {(), (50,), (50, 51)}  # 1 2 3 beats the later 2 3
    two = NGram(Options(tokens=2, min_match=1, candidates=2)).draft([text(tokens)], [Budget(8, 8)])
    assert drafted(two) == {(), (50,), (50, 51), (60,), (60, 61)}
    assert two.tokens[0, two.children[0, 0]].tolist() == [50, 60]  # the better match comes first


def test_a_repeated_pattern_is_drafted_at_full_length() -> None:
    tree = NGram(Options(tokens=7)).draft([text([5, 6, 7, 5, 6, 7, 5, 6])], [Budget(8, 8)])
    assert tree.tokens.tolist() == [[6, 7, 5, 6, 7, 5, 6, 7]]


def test_nothing_to_copy_is_plain_decoding() -> None:
    tree = NGram(Options()).draft([text([1, 2, 3]), text([4])], [Budget(8, 8), Budget(8, 8)])
    assert tree.size == 1


def test_a_batch_equals_each_alone_and_forgetting_changes_nothing() -> None:
    texts = [sequence(number, length=60, vocabulary=4) for number in range(4)]
    budgets = [Budget(9, 5), Budget(0, 5), Budget(4, 2), Budget(9, 9)]
    drafter = NGram(Options(candidates=3))
    together = drafter.draft(texts, budgets)
    for row, (one, budget) in enumerate(zip(texts, budgets, strict=True)):
        alone = NGram(Options(candidates=3)).draft([one], [budget])
        assert paths_of(together, row) == paths_of(alone, 0)
    drafter.forget(texts[0])
    assert paths_of(drafter.draft(texts[:1], budgets[:1]), 0) == paths_of(together, 0)


def test_a_tree_sets_number_and_length() -> None:
    assert Options(tree="6").copies == (1, 6)
    assert Options(tree="fixed:3,1,1").copies == (3, 3)
    assert Options(tokens=5, candidates=2).copies == (2, 5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": 0}, "tokens is 0: give a whole number from 1 to 64"),
        ({"candidates": 1.5}, "candidates is 1.5: give a whole number from 1 to 32"),
        ({"min_match": 5}, "min_match is 5 and max_match 4: give a min_match"),
        ({"tree": "3,2"}, r"cannot make the tree '3,2': write"),
        ({"tree": "fixed:3,2"}, "cannot make the tree"),
        ({"tree": "x"}, "not understood"),
    ],
)
def test_refusals(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", [1, 3])
def test_time_is_printed(candidates: int) -> None:
    one = sequence(1, length=6000, vocabulary=500)
    drafter = NGram(Options(candidates=candidates, min_match=1))
    start = time.perf_counter()
    drafter.draft([one], [Budget(24, 8)])
    first = time.perf_counter() - start
    spent = []
    for step in range(200):
        one.commit([step % 500, (7 * step) % 500])
        start = time.perf_counter()
        drafter.draft([one], [Budget(24, 8)])
        spent.append(time.perf_counter() - start)
    median = sorted(spent)[100]
    print(f"ngram, {candidates} candidates: index {first * 1e3:.1f} ms, then {median * 1e6:.0f} µs a step")
