"""Trees of heads that need no pass below the root, against the general way to grow them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.history import History
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.growing import grow
from forerun.drafters.side_run import SideRun, candidates
from forerun.drafters.tree_spec import TreeSpec

VOCABULARY, COLUMNS, DEPTHS = 40, 12, 4
IDS = torch.tensor([1, 4, 5, 9, 12, 13, 20, 21, 22, 30, 38, 39])
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.05], [0.3, 0.1, 0.05], [0.2, 0.1, 0.01]]
SPECS = [
    TreeSpec.parse("4"),
    TreeSpec.parse("fixed:3,2,1"),
    TreeSpec.parse("static:14").measured(ACCURACIES),
    TreeSpec.parse("dynamic:3,4,12"),
    TreeSpec.parse("dynamic:1,3,3"),
]


class ByLevels:
    """The same run without a way of its own."""

    def __init__(self, run: SideRun) -> None:
        self.run = run

    def __getattr__(self, name: str) -> object:
        if name == "grow":
            raise AttributeError(name)
        return getattr(self.run, name)


def sequence(number: int, **params: float) -> Sequence:
    made = SamplingParams(**params)  # type: ignore[arg-type]
    return Sequence([3, 7, number], 50, id=number, params=made, seed=made.seed or 0, coupled=made.seed is not None)


def run_over(logits: Tensor, parts: list[bool], ids: Tensor | None) -> SideRun:
    return SideRun(logits[: sum(parts)] if any(parts) else None, parts, torch.device("cpu"), ids)


def listed(tree: DraftTree, b: int) -> set[tuple[int, ...]]:
    """The paths of a tree."""
    paths: list[tuple[int, ...]] = [()]
    parents, tokens = tree.parents[b].tolist(), tree.tokens[b].tolist()
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            found[node] = (*found[parents[node]], tokens[node])
            paths.append(found[node])
    return set(paths)


GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.8, "seed": 5}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("cut", [False, True])
@given(seed=st.integers(0, 2**16), budget=st.integers(0, 14), depth=st.integers(0, 4), sits_out=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_tree_is_that_of_the_levels(
    spec: TreeSpec, cut: bool, seed: int, budget: int, depth: int, sits_out: bool
) -> None:
    """And a dynamic one is worth as much or more."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, DEPTHS, COLUMNS if cut else VOCABULARY, generator=generator)
    sequences = [sequence(1, **GREEDY), sequence(2, **SEEDED), sequence(3, **GREEDY)]
    parts = [True, True, not sits_out]
    budgets = [Budget(14, 4), Budget(budget, depth), Budget(14, 3)]
    run = run_over(logits, parts, IDS if cut else None)
    own, general = (
        grow(spec, VOCABULARY, History(VOCABULARY, run.device), sequences, each, budgets, taus=Taus(0.8, 0.6))  # type: ignore[arg-type]
        for each in (run, ByLevels(run_over(logits, parts, IDS if cut else None)))
    )
    assert own.log_values is not None
    assert general.log_values is not None
    for b, (mine, theirs) in enumerate(zip(own.log_values(), general.log_values(), strict=True)):
        assert mine is not None
        assert theirs is not None
        if spec.dynamic:
            best = sum(map(math.exp, mine[1:]))
            assert best >= sum(math.exp(value) for value in theirs[1 : len(mine)]) - 1e-6
            assert len(listed(own, b)) == len(listed(general, b)) or not parts[b]
            assert max(map(len, listed(own, b))) <= min(budgets[b].depth, spec.depth)
        else:
            assert listed(own, b) == listed(general, b)
            assert mine == pytest.approx(theirs[: len(mine)], abs=1e-5)


@given(seed=st.integers(0, 2**16), nodes=st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_the_most_valuable_nodes_of_all(seed: int, nodes: int) -> None:
    logits = 2 * torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(seed))
    text = sequence(1, **GREEDY)
    run = run_over(logits, [True], None)
    tree = run.grow(TreeSpec.parse("dynamic:5,3,100"), [text], [Budget(nodes, 3)], Taus(1.0, 0.8))
    assert tree is not None
    assert tree.log_values is not None
    (values,) = tree.log_values()
    assert values is not None
    shares = (logits[0].double() / 0.8).log_softmax(1)
    every = [
        sum(shares[level, token].item() for level, token in enumerate(path))
        for length in (1, 2, 3)
        for path in itertools.product(range(5), repeat=length)
    ]
    assert values[1:] == pytest.approx(sorted(every, reverse=True)[:nodes], abs=1e-5)


def test_who_draws_or_cuts_goes_by_levels() -> None:
    run = run_over(torch.randn(1, DEPTHS, VOCABULARY), [True], None)
    for params in ({"temperature": 1.0}, {"temperature": 0.8, "seed": 1, "top_p": 0.9}, {"presence_penalty": 0.5}):
        text = sequence(1, **{"temperature": 0.0, **params})
        assert run.grow(SPECS[1], [text], [Budget(9, 4)], Taus()) is None


def test_a_broken_head_drafts_nonsense_and_no_more() -> None:
    logits = torch.full((1, DEPTHS, VOCABULARY), torch.nan)
    columns, shares = candidates(logits, None, [sequence(1, **GREEDY)], 3, Taus())
    assert columns.shape == shares.shape == (1, DEPTHS, 3)
    assert shares.isfinite().all()
