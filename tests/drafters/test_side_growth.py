"""Trees of heads that guess from one state as a device grows them, against those that the host grows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget
from forerun.drafters.side_growth import SideGrowth, within_reach
from forerun.drafters.side_run import SideRun
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.side_heads import SideHeads
from forerun.models.static.capture import Graphs
from tests.drafters.models import paths_of
from tests.drafters.test_heads import SIDE, shaken
from tests.models.test_feature_head import target_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = [TreeSpec.parse(f"dynamic:{numbers}") for numbers in ("3,3,12", "10,3,60", "1,3,3", "4,2,6", "2,1,2", "1,1,1")]
BUDGETS = [Budget(60, 3), Budget(5, 3), Budget(9, 2), Budget(0, 0)]


def heads_of(method: str, *, cut: bool) -> SideHeads:
    target = target_of(torch.float32).to(DEVICE)
    made = shaken(method, target, torch.arange(0, 128, 2) if cut else None)
    assert isinstance(made, SideHeads)
    return made


def sequence(number: int, temperature: float) -> Sequence:
    params = SamplingParams(temperature=temperature, seed=number)
    return Sequence([3, 7, number], 50, id=number, params=params, seed=number, coupled=temperature > 0)


@pytest.mark.parametrize("method", SIDE)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@torch.inference_mode()
def test_the_trees_are_the_hosts(method: str, cut: bool, raced: bool, spec: TreeSpec) -> None:
    heads = heads_of(method, cut=cut)
    sequences = [sequence(number, 0.7 if raced and number % 2 else 0.0) for number in range(1, 5)]
    states = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    growth = SideGrowth(heads, spec, 8, raced, Taus(0.8, 1.3), Graphs(DEVICE), Graphs(DEVICE).pool())
    growth.bring(states, sequences, BUDGETS)
    own = growth.run().on(torch.device("cpu"))
    roots = torch.tensor([each.tokens[-1] for each in sequences], device=DEVICE)
    host = SideRun(heads(states, roots), [True] * 4, DEVICE, heads.ids).grow(spec, sequences, BUDGETS, Taus(0.8, 1.3))
    assert host is not None
    for b, budget in enumerate(BUDGETS):
        paths = paths_of(own, b)
        assert set(paths) == set(paths_of(host, b))
        assert len(paths) == 1 + min(spec.size, budget.nodes, sum(spec.width**d for d in range(1, budget.depth + 1)))
        assert own.tokens[b, 0] == b + 1
        assert own.positions[b, 0] == 2
    assert all(len(paths_of(own, b)) == 1 for b in range(4, 8))  # nobody is there


@given(
    width=st.integers(1, 5),
    depth=st.integers(1, 4),
    size=st.integers(1, 24),
    seed=st.integers(0, 2**16),
    even=st.booleans(),
)
@settings(max_examples=200)
def test_no_tree_reaches_beyond_what_is_listed(width: int, depth: int, size: int, seed: int, even: bool) -> None:
    listed = list(within_reach(width, depth, size))
    assert len(set(listed)) == len(listed)
    assert all(path[:-1] in listed[:number] for number, path in enumerate(listed) if path)
    scale = 0.01 if even else 3.0
    logits = scale * torch.randn(depth, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shares = logits.log_softmax(1).sort(1, descending=True).values.tolist()
    every = [path for length in range(depth + 1) for path in itertools.product(range(width), repeat=length)]
    worth = {path: sum(shares[level][rank] for level, rank in enumerate(path)) for path in every}
    best = sorted(every, key=lambda path: (-worth[path], len(path)))[: 1 + size]
    assert set(best) <= set(listed)


@torch.inference_mode()
def test_broken_logits_draft_nothing() -> None:
    heads = heads_of("medusa", cut=False)
    growth = SideGrowth(heads, SPECS[0], 1, False, Taus(), Graphs(DEVICE), None)
    growth.bring(torch.full((1, 64), float("nan"), device=DEVICE), [sequence(1, 0.0)], [Budget(12, 3)])
    assert len(paths_of(growth.run().on(torch.device("cpu")), 0)) == 1
