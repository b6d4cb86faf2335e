from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.drafter import Budget, Checked, Observation
from forerun.drafters.kinds import CHEAP_NODES
from forerun.drafters.recycling import ACCEPTANCE, EMPTY, LEARNING, Options, Recycling, committed_last
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.trees.static import greedy
from tests.drafters.contract import check_nodes
from tests.drafters.models import VOCABULARY, accept_some, paths_of, sequence
from tests.engine.tiny import drain, tiny_model

PLENTY = Budget(64, 64)
Table = dict[int, list[int]]


def text(tokens: list[int], number: int = 0) -> Sequence:
    return Sequence(tokens, 10_000, id=number)


def drafter(vocabulary: int = VOCABULARY, **options: Any) -> Recycling:
    return Recycling(Options(**{"prompt": False, **options}), vocabulary)


def teach(made: Recycling, table: Table) -> None:
    """As if the target had just read each of these tokens as a root."""
    for token, candidates in table.items():
        made.observe([Observation(text([token]), [], {}, 0, Checked([token], [-1], torch.tensor([candidates])))])


def naive_paths(table: Table, root: int, ranks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """One node after the other, in the order of the shape."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in ranks:
        if path and path[:-1] in found:
            before = found[path[:-1]]
            candidates = table.get(before[-1] if before else root, [])
            if path[-1] < len(candidates):
                found[path] = (*before, candidates[path[-1]])
    return list(found.values())


def naive_default(budget: Budget) -> list[tuple[int, ...]]:
    """The greedy builder again, told how deep and how many."""
    shape = greedy(ACCEPTANCE[: budget.depth], 1 + min(CHEAP_NODES, budget.nodes))
    full = greedy(ACCEPTANCE, 1 + CHEAP_NODES)
    return [path for path in shape.rank_paths if path in full.rank_paths]


tables = st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
budgets = st.builds(Budget, st.integers(0, 40), st.integers(0, 8))


@given(
    table=tables,
    asked=st.lists(st.tuples(st.integers(0, 9), budgets), min_size=1, max_size=4),
    tree=st.sampled_from(["", "", "5", "fixed:3,2,1"]),
)
def test_equals_a_naive_walk(table: Table, asked: list[tuple[int, Budget]], tree: str) -> None:
    made = drafter(10, tree=tree)
    teach(made, table)
    sequences = [text([root], number) for number, (root, _) in enumerate(asked)]
    drafted = made.draft(sequences, [budget for _, budget in asked])
    for row, (root, budget) in enumerate(asked):
        ranks = list(TreeSpec.parse(tree).cut(budget).rank_paths) if tree else naive_default(budget)
        assert paths_of(drafted, row) == naive_paths(table, root, ranks)


@given(table=tables, asked=st.lists(st.tuples(st.integers(0, 9), budgets), min_size=1, max_size=4))
def test_the_tree_is_the_one_that_build_would_make(table: Table, asked: list[tuple[int, Budget]]) -> None:
    made = drafter(10)
    teach(made, table)
    tree = made.draft([text([1, root], n) for n, (root, _) in enumerate(asked)], [budget for _, budget in asked])
    built = DraftTree.build(tree.tokens, tree.parents, torch.ones(len(asked), dtype=torch.int64), Drawing.FIXED)
    for name in ("tokens", "depths", "positions", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(built, name)), name
    width = built.width
    assert torch.equal(tree.children[..., :width], built.children)
    assert bool((tree.children[..., width:] < 0).all())
    assert (tree.max_depth, tree.max_draws) == (built.max_depth, built.max_draws)


def test_a_tight_budget_keeps_the_most_valuable_nodes() -> None:
    made = drafter()
    teach(made, {token: [(token + step) % VOCABULARY for step in range(1, 9)] for token in range(VOCABULARY)})
    values = {}
    for path in greedy(ACCEPTANCE, 1 + CHEAP_NODES).rank_paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= ACCEPTANCE[depth][rank]
        values[tuple((sum(path[: end + 1]) + end + 1) % VOCABULARY for end in range(len(path)))] = value
    for nodes in range(CHEAP_NODES + 1):
        kept = set(paths_of(made.draft([text([0])], [Budget(nodes, 64)]), 0))
        assert len(kept) == 1 + nodes
        dropped = [value for path, value in values.items() if path not in kept]
        assert min(values[path] for path in kept) >= max(dropped, default=0.0) - 1e-12
    assert made.draft([text([0])], [PLENTY]).size == 1 + CHEAP_NODES


def test_a_thin_tree_of_a_batch_is_padded_to_the_largest_only() -> None:
    made = drafter()
    teach(made, {1: [2, 3], 2: [4]})
    tree = made.draft([text([1], 0), text([9], 1), text([2], 2)], [PLENTY] * 3)
    assert tree.size == 4
    assert [paths_of(tree, row) for row in range(3)] == [[(), (2,), (3,), (2, 4)], [()], [(), (4,)]]
    assert made.draft([text([9])], [PLENTY]).size == 1


def test_refused_nodes_teach_and_committed_ones_have_the_last_word() -> None:
    #        5
    #      6   7       7 → 6 is committed; 6 stood at the root's other child as well, and 8 was refused
    #      8   6
    #          7
    top = torch.arange(60).view(6, 10)[:, :2]
    checked = Checked([5, 6, 7, 8, 6, 7], [-1, 0, 0, 1, 2, 4], top)
    made = drafter(60, top=2, tree="fixed:2,2")
    made.observe([Observation(text([5, 7, 6, 9]), [7, 6, 9], {}, 0, checked)])
    assert {token: made.table[token].tolist() for token in (5, 6, 7, 8)} == {
        5: [0, 1],
        6: [40, 41],  # the committed one
        7: [20, 21],  # the committed one, although a refused one lies deeper
        8: [30, 31],
    }
    assert made.table[9].tolist() == [EMPTY, EMPTY]
    made.observe([Observation(text([5, 7, 6, 7, 9]), [7, 6, 7, 9], {}, 0, checked)])
    assert made.table[7].tolist() == [50, 51]  # both committed: the deeper
    made.observe([Observation(text([1]), [], {}, 0, None)])  # a part of a prompt was read


def test_the_committed_path_comes_last() -> None:
    checked = Checked([5, 6, 7, 8, 6, 7], [-1, 0, 0, 1, 2, 4], torch.zeros(6, 1))
    assert committed_last(checked, [7, 6, 9]) == [1, 3, 5, 0, 2, 4]
    assert committed_last(checked, [9]) == [1, 2, 3, 4, 5, 0]
    assert committed_last(checked, []) == [1, 2, 3, 4, 5, 0]


def test_the_table_equals_a_naive_one() -> None:
    made, chosen, table = drafter(), random.Random(3), dict[int, list[int]]()
    running = [sequence(number) for number in range(3)]
    for _ in range(40):
        tree = made.draft(running, [PLENTY] * 3)
        seen = []
        for row, one in enumerate(running):
            checked, tokens = check_nodes(tree, row, 8, chosen), accept_some(tree, row, chosen)
            one.commit(tokens)
            seen.append(Observation(one, tokens, {}, 0, checked))
            rows = list(zip(checked.tokens, checked.parents, checked.top.tolist(), strict=True))
            table.update({token: top for token, _, top in rows})
            node = 0
            for end in range(len(tokens)):  # then the committed ones again
                table[rows[node][0]] = rows[node][2]
                children = [n for n, (token, parent, _) in enumerate(rows) if (parent, token) == (node, tokens[end])]
                if not children:
                    break
                node = children[0]
            table[rows[node][0]] = rows[node][2]
        made.observe(seen)
        assert {token: row for token, row in enumerate(made.table.tolist()) if row[0] != EMPTY} == table


def test_empty_rows_begin_with_what_followed_in_the_prompt() -> None:
    made = drafter(prompt=True)
    teach(made, {2: [30, 31]})
    one = text([1, 5, 2, 6, 1, 7, 1, 5, 1])
    made.draft([one], [PLENTY])
    assert made.table[1].tolist() == [5, 7, *[EMPTY] * 6]  # the latest first, each once
    assert made.table[5].tolist()[:2] == [1, 2]
    assert made.table[2].tolist()[:2] == [30, 31]  # the target knows better
    assert made.table[VOCABULARY].tolist() == [EMPTY] * 8
    quiet = drafter()
    assert quiet.draft([one], [PLENTY]).size == 1


def test_a_row_that_shrinks_leaves_nothing_behind() -> None:
    made = drafter(5, prompt=True)  # five tokens have five candidates
    made.draft([text([0, 1, 0, 2, 0, 3, 0, 4, 0])], [PLENTY])
    teach(made, {0: [4, 3, 2, 1, 0]})
    assert made.table[0].tolist() == [4, 3, 2, 1, 0, EMPTY, EMPTY, EMPTY]
    teach(made, {0: [2]})
    assert made.table[0].tolist() == [2, *[EMPTY] * 7]


def test_all_texts_share_the_table_and_forgetting_leaves_it() -> None:
    made = drafter(prompt=True)
    first = text([1, 2, 3, 1], 1)
    before = paths_of(made.draft([first], [PLENTY]), 0)
    made.forget(first)
    made.forget(first)
    assert paths_of(made.draft([first], [PLENTY]), 0) == before  # after stepping back
    assert paths_of(made.draft([text([1], 2)], [PLENTY]), 0) == before


def run(**options: Any) -> tuple[Any, Engine]:
    target = tiny_model()
    made = Engine(target, Recycling(Options(**options), target.vocab_size), slots=512)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    return drain(made, [Request([7, 8, 9, number], params) for number in range(3)]), made


@pytest.mark.parametrize("tree", ["", "4", "fixed:4,2,1"])
def test_a_tiny_model_is_drafted_well_and_always_the_same(tree: str) -> None:
    texts, made = run(tree=tree)
    assert made.statistics.accepted > 0
    assert made.statistics.tokens_per_pass > 1.05
    again, other = run(tree=tree)
    assert again == texts
    assert other.statistics.accepted_by_depth == made.statistics.accepted_by_depth


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top": 0}, "top is 0: give a whole number from 1 to 64"),
        ({"top": True}, "top is True: give a whole number"),
        ({"prompt": "yes"}, "prompt is 'yes': give true or false"),
        ({"tree": "3,2"}, r"cannot make the tree '3,2': write \"fixed:4,2,1\""),
        ({"tree": "dynamic:4,4,16"}, "cannot make the tree"),
        ({"tree": "fixed:9,1"}, "has 9 children at a node and the recycling option top is 8: keep as many"),
        ({"tree": "x"}, "not understood"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Options(**options)


def test_of_texts_that_share_a_token_the_last_one_counts() -> None:
    together, apart = (Recycling(Options(nodes=20, top=2), 64) for _ in range(2))
    seen = []
    for number, tokens in enumerate(([5, 6, 7], [6, 5, 5], [9], [5, 9])):
        parents = [-1, 0, 0][: len(tokens)]
        top = torch.arange(2 * len(tokens)).view(-1, 2) + 10 * number
        seen.append(Observation(sequence(number), [6, 3], {}, 0, Checked(tokens, parents, top)))
    together.observe(seen)
    for one in seen:
        apart.observe([one])
    assert np.array_equal(together.table, apart.table)
    assert together.table[5].tolist() == [30, 31]
    assert together.table[9].tolist() == [32, 33]
    together.observe([])


def test_what_it_expects_are_the_nodes_that_it_would_draft() -> None:
    """With a table that always learns of so many."""
    made = Recycling(Options(nodes=20), 64)
    gains = [made.gain(nodes) for nodes in range(21)]
    assert gains[0] == 0 < gains[1] < ACCEPTANCE[0][0] < gains[20] == made.gain(None) == made.gain(99)
    values = [math.prod(ACCEPTANCE[d][r] for d, r in enumerate(path)) for path in greedy(ACCEPTANCE, 21).rank_paths]
    for nodes in (1, 2, 7, 20):
        worth = sum(values[node] for node in made.shape.cut(Budget(nodes, 64)))
        assert made.gain(nodes) == pytest.approx(worth * (nodes / 20) ** LEARNING)
    large = Recycling(Options(nodes=63), 64)
    for nodes, found in ((2, 0.265), (6, 0.440), (15, 0.649)):  # of what 63 nodes gained on training prompts
        assert large.gain(nodes) / large.gain(None) == pytest.approx(found, abs=0.03)
    assert Recycling(Options(tree="fixed:3,2"), 64).gain(None) == 0, (
        "of a tree that somebody wrote nothing was measured"
    )


def test_fewer_candidates_make_a_narrower_shape() -> None:
    assert Recycling(Options(top=2), VOCABULARY).shape.width == 2
    chain = Recycling(Options(top=1), VOCABULARY)
    assert not chain.branches
    assert chain.shape.depth == len(ACCEPTANCE)
    assert not Recycling(Options(tree="3"), VOCABULARY).branches


@pytest.mark.parametrize("batch", [1, 8])
def test_time_is_printed(batch: int) -> None:
    vocabulary, chosen = 49_152, random.Random(0)
    made = Recycling(Options(), vocabulary)
    teach(made, {token: chosen.sample(range(500), 8) for token in range(500)})
    running = [sequence(number, length=500, vocabulary=500) for number in range(batch)]
    drafting, learning = [], []
    for step in range(100):
        start = time.perf_counter()
        tree = made.draft(running, [PLENTY] * batch)
        drafting.append(time.perf_counter() - start)
        seen = []
        for row, one in enumerate(running):
            one.commit([step])
            seen.append(Observation(one, [step], {}, 0, check_nodes(tree, row, 8, chosen)))
        start = time.perf_counter()
        made.observe(seen)
        learning.append(time.perf_counter() - start)
    medians = [1e6 * sorted(spent)[50] for spent in (drafting, learning)]
    print(f"recycling, batch {batch}: {medians[0]:.0f} µs to draft, {medians[1]:.0f} µs to learn")
