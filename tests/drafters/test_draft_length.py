"""How far to draft: what pays by the closed form, learnt from what came true."""

from __future__ import annotations

import random

import pytest

from forerun.drafters.draft_length import LEAST_GAIN, OFTEN, SELDOM, Costs, DraftLength, Rate
from forerun.drafters.tree_spec import TreeSpec
from forerun.theory.closed_form import best_gamma, expected_tokens, speedup

CHEAP = Costs(0.2, {1: 1.0, 8: 1.1})


def chain(length: int, right: int) -> tuple[list[int], list[int], list[int]]:
    """Parents and tokens of a chain of drafts, and a text that follows it so far."""
    tokens = list(range(length + 1))
    return [-1, *range(length)], tokens, [*tokens[1 : 1 + right], 99]


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("level", [0.05, 0.3, 0.7, 1.0])
def test_a_chain_is_as_long_as_the_closed_form_says(rate: float, level: float) -> None:
    costs = Costs(level, {1: 1.0, 8: 1.2})
    length = DraftLength(TreeSpec.parse("6"), costs, Rate(rate, 8))
    best = best_gamma(rate, level, {1: 1.0, 8: 1.2}, 6)
    if best and speedup(rate, best, level, {1: 1.0, 8: 1.2}) < LEAST_GAIN:
        best = 0
    assert length.best(rate) == best


def test_a_tree_is_priced_by_its_rows() -> None:
    rows = {1: 1.0, 16: 4.0}  # a pass over many rows is dear
    wide, narrow = (DraftLength(TreeSpec.parse(tree), Costs(0.1, rows), Rate(0.8, 8)) for tree in ("4,2,2", "3"))
    assert wide.best(0.8) < narrow.best(0.8) == 3
    assert DraftLength(TreeSpec.parse("dynamic:4,4,40"), Costs(0.1, rows), Rate(0.8, 8)).best(0.8) == 0


def test_costs_go_on_beyond_what_was_measured() -> None:
    assert Costs(0.5, {1: 1.0, 2: 1.1, 4: 1.5}).by_rows[257] == pytest.approx(1.5 + 0.2 * 253)
    assert Costs(0.5, {}).by_rows == {1: 1.0, 257: 1.0}
    assert Costs(0.5, {1: 1.0, 4: 1.2, 8: 1.1}).by_rows[257] == 1.1  # a slope that is noise


def test_hopeless_drafts_end_and_are_tried_again_now_and_then() -> None:
    length = DraftLength(TreeSpec.parse("4"), Costs(0.5, {}), Rate(0.9, 4))
    depths = []
    for _ in range(40 + 10 * SELDOM):
        depths.append(length.next())
        if depths[-1]:
            length.learn(*chain(depths[-1], 0))
    assert depths[0] > 1
    assert sum(map(bool, depths[:40])) < 8  # it was soon clear
    later = depths[40:]
    assert max(later) == 1
    assert sum(later) == 10  # one single draft in SELDOM steps


def test_good_drafts_come_back() -> None:
    length = DraftLength(TreeSpec.parse("4"), CHEAP, Rate(0.0, 64))
    steps = 0
    while length.next() < 4:
        steps += 1
        if not length.next():
            continue
        length.learn(*chain(1, 1))
        assert steps < 40 * OFTEN
    assert length.rate.value > 0.4


def test_the_rate_is_that_of_the_drafts() -> None:
    chosen = random.Random(0)
    length = DraftLength(TreeSpec.parse("6"), CHEAP, Rate(0.2, 32))
    total = []
    for _ in range(3000):
        depth = length.next()
        right = 0
        while right < depth and chosen.random() < 0.7:
            right += 1
        length.learn(*chain(depth, right))
        total.append(depth)
    assert length.rate.value == pytest.approx(0.7, abs=0.15)
    assert expected_tokens(0.7, total[-1]) > 2


def test_only_what_was_drafted_and_came_to_be_known_counts() -> None:
    length = DraftLength(TreeSpec.parse("3,2"), CHEAP, Rate(0.5, 7))

    def after(parents: list[int], tokens: list[int], text: list[int]) -> tuple[float, float]:
        length.rate = Rate(0.5, 7)
        length.learn(parents, tokens, text)
        return length.rate.weight, length.rate.value

    assert after([-1], [5], [6, 7]) == (7, 0.5)  # nothing was drafted
    assert after([-1, 0, 0, 1, -1], [5, 6, 7, 8, 9], []) == (7, 0.5)  # nothing came
    assert after([-1, 0, 0, 1, -1], [5, 6, 7, 8, 9], [7, 8]) == pytest.approx((8, 0.5 + 0.5 / 8))  # a leaf
    assert after([-1, 0, 0, 1, -1], [5, 6, 7, 8, 9], [9, 8]) == pytest.approx((8, 0.5 - 0.5 / 8))  # an absent node
    assert after([-1, 0, 0, 1, -1], [5, 6, 7, 8, 9], [6, 8, 1])[0] == 9
