from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from forerun.core.shape import TreeShape
from forerun.trees.dynamic import Frontier, Grown, Node, expand_and_rerank
from tests.trees.table_drafter import Case, Table, cases, fixed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def assert_equals_reference(grown: Grown, b: int, reference: list[Node], size: int) -> None:
    padding = size - len(reference)
    assert grown.tokens[b].tolist() == [node.token for node in reference] + [0] * padding
    assert grown.parents[b].tolist() == [node.parent for node in reference] + [-1] * padding
    assert grown.log_values[b].tolist() == [node.log_value for node in reference] + [-math.inf] * padding


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_equals_the_reference(device: str, case: Case) -> None:
    grown = case.grow(case.table.to(device), case.table.roots.to(device))
    assert grown.tokens.dtype == grown.parents.dtype == torch.int64
    assert grown.log_values.dtype == torch.float32
    for b in range(len(case.table.roots)):
        assert_equals_reference(grown, b, case.reference(b), case.size)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_tree_is_connected_and_in_order(case: Case) -> None:
    grown = case.grow()
    for b in range(len(case.table.roots)):
        shape = grown.shape(b)  # TreeShape refuses a parent that is missing or late
        values = grown.log_values[b].tolist()
        assert shape.size == sum(value > -math.inf for value in values) <= case.size
        assert shape.depth <= case.depth
        assert values == sorted(values, reverse=True)  # padding last, the root first
        assert values[0] == 0.0
        for node in range(1, shape.size):
            assert values[shape.parents[node]] >= values[node]
            before = node - 1
            if values[before] == values[node]:  # a tie: the shallower first
                assert shape.depths[before] <= shape.depths[node]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_row_does_not_see_its_batch(case: Case) -> None:
    together = case.grow()
    for b in range(len(case.table.roots)):
        alone = case.grow(case.table.row(b), case.table.roots[b : b + 1])
        for field in ("tokens", "parents", "log_values"):
            assert torch.equal(getattr(alone, field)[0], getattr(together, field)[b])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_prefix_is_the_tree_of_that_size(case: Case) -> None:
    whole = case.grow()
    for size in range(1, case.size):
        cut = expand_and_rerank(case.table.roots, case.table, width=case.width, depth=case.depth, size=size)
        assert torch.equal(cut.tokens, whole.tokens[:, :size])
        assert torch.equal(cut.parents, whole.parents[:, :size])


def test_by_hand() -> None:
    """Two candidates of 0.6 and 0.3 per node: 0.6, 0.36, 0.3, 0.216, then 0.18 twice, the earlier first."""
    root = torch.tensor([9])
    grown = expand_and_rerank(root, fixed([7, 8], [0.6, 0.3]), width=2, depth=3, size=6)
    assert grown.tokens.tolist() == [[9, 7, 7, 8, 7, 8]]
    assert grown.parents.tolist() == [[-1, 0, 1, 0, 2, 1]]
    assert grown.log_values.exp()[0].tolist() == pytest.approx([1, 0.6, 0.36, 0.3, 0.216, 0.18])
    assert grown.shape(0).rank_paths == ((), (0,), (0, 0), (1,), (0, 0, 0), (0, 1))


def test_siblings_are_ranked_by_confidence_and_equal_ones_as_they_came() -> None:
    grown = expand_and_rerank(torch.tensor([0]), fixed([3, 4, 5, 6], [0.1, 0.4, 0.1, 0.2]), width=1, depth=1, size=5)
    assert grown.tokens.tolist() == [[0, 4, 6, 3, 5]]


def test_a_tie_goes_to_the_parent() -> None:
    """Certain drafts: all nodes have V = 1, so the shallow ones win, and the tree stays connected."""
    table = fixed([3, 4], [1.0, 1.0])
    assert expand_and_rerank(torch.tensor([0]), table, width=9, depth=3, size=7).shape(0).depths[1:] == (
        1,
        1,
        2,
        2,
        2,
        2,
    )
    # A candidate whose confidence is lost in rounding: log V = -1 - 1e-9 is -1 in float32.
    deep = Table(table.tokens, [torch.full((1, 100, 2), c) for c in (-1.0, -1e-9, -1e-9, -1e-9)])
    assert expand_and_rerank(torch.tensor([0]), deep, width=1, depth=4, size=6).shape(0).depths[1:] == (
        1,
        1,
        2,
        2,
        3,
    )


def test_confidences_above_one_cannot_disconnect_the_tree() -> None:
    table = Table(
        [torch.ones(1, 100, 2, dtype=torch.int64)] * 3, [torch.full((1, 100, 2), c) for c in (-1.0, 0.5, 3.0)]
    )
    grown = expand_and_rerank(torch.tensor([0]), table, width=4, depth=3, size=5)
    assert grown.shape(0).depths == (0, 1, 1, 2, 2)
    assert grown.log_values.tolist() == [[0.0, -1.0, -1.0, -1.0, -1.0]]


def test_only_the_most_valuable_nodes_of_the_last_level_grow() -> None:
    seen: list[Frontier] = []
    table = fixed([7, 8, 9], [0.5, 0.3, 0.2])

    def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
        seen.append(frontier)
        return table(frontier)

    expand_and_rerank(torch.tensor([1]), children, width=2, depth=3, size=4)
    assert [frontier.depth for frontier in seen] == [0, 1, 2]
    assert [frontier.tokens.tolist() for frontier in seen] == [[[1]], [[7, 8]], [[7, 8]]]
    assert [frontier.nodes.tolist() for frontier in seen] == [[[0]], [[1, 2]], [[4, 5]]]
    assert [frontier.parents.tolist() for frontier in seen] == [[[-1]], [[0, 0]], [[1, 1]]]
    assert seen[2].log_values.exp()[0].tolist() == pytest.approx([0.25, 0.15])


def test_absent_candidates_are_never_kept_nor_shown_with_their_token() -> None:
    tokens = torch.tensor([-1, 5, -1]).expand(1, 100, 3)
    confidences = torch.tensor([-math.inf, -1.0, -math.inf]).expand(1, 100, 3)
    table = Table([tokens] * 3, [confidences] * 3)  # Table looks the tokens up, as an embedding would
    grown = expand_and_rerank(torch.tensor([2]), table, width=3, depth=3, size=8)
    assert grown.tokens.tolist() == [[2, 5, 5, 5, 0, 0, 0, 0]]
    assert grown.parents.tolist() == [[-1, 0, 1, 2, -1, -1, -1, -1]]
    assert grown.shape(0) == TreeShape.chain(3)


def test_nothing_exists() -> None:
    table = Table([torch.zeros(2, 100, 3, dtype=torch.int64)] * 2, [torch.full((2, 100, 3), -math.inf)] * 2)
    grown = expand_and_rerank(torch.tensor([2, 3]), table, width=3, depth=2, size=3)
    assert grown.tokens.tolist() == [[2, 0, 0], [3, 0, 0]]
    assert grown.parents.tolist() == [[-1, -1, -1]] * 2


@pytest.mark.parametrize(("depth", "size"), [(0, 1), (0, 4), (3, 1)])
def test_no_drafting_asks_for_no_children(depth: int, size: int) -> None:
    def children(frontier: Frontier) -> tuple[Tensor, Tensor]:
        raise AssertionError("nothing is to be drafted")

    grown = expand_and_rerank(torch.tensor([4, 5]), children, width=2, depth=depth, size=size)
    assert grown.tokens.tolist() == [[4] + [0] * (size - 1), [5] + [0] * (size - 1)]
    assert grown.shape(1) == TreeShape.chain(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_summed_in_float32(dtype: torch.dtype) -> None:
    grown = expand_and_rerank(torch.tensor([0]), fixed([1], [0.7], dtype), width=1, depth=3, size=4)
    step = torch.tensor(0.7).log().to(dtype).float()
    assert grown.log_values.dtype == torch.float32
    assert grown.log_values[0].tolist() == [0.0, step, step + step, step + step + step]
    if dtype == torch.bfloat16:  # the case can tell: bfloat16 could not hold the sum
        assert grown.log_values[0, 3] != grown.log_values[0, 3].to(dtype)


def test_an_empty_batch() -> None:
    table = Table.random(0, 0, [2, 2])
    assert expand_and_rerank(table.roots, table, width=2, depth=2, size=5).parents.shape == (0, 5)


@contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode does not see every wait
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["meta", DEVICES[1]])
def test_never_waits_for_the_device(device: str) -> None:
    """Meta tensors have no values: code that looks at one (.item(), nonzero, a mask as an index) fails."""
    table = Table.random(0, 3, [4, 4, 4]).to(device)
    roots = torch.arange(3).to(device)
    with no_synchronisation(device):
        grown = expand_and_rerank(roots, table, width=3, depth=3, size=50)
    assert grown.tokens.shape == grown.parents.shape == grown.log_values.shape == (3, 50)
    assert grown.parents.device.type == device


@pytest.mark.parametrize(
    ("width", "depth", "size", "message"),
    [(0, 1, 2, "width is 0"), (1, -1, 2, "depth is -1"), (1, 1, 0, "size is 0")],
)
def test_bad_sizes_are_refused(width: int, depth: int, size: int, message: str) -> None:
    case = Case(fixed([1], [0.5]), width, depth, size)
    with pytest.raises(ValueError, match=message):
        case.grow(roots=torch.tensor([0]))
    with pytest.raises(ValueError, match=message):
        case.reference(0)


def test_bad_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="one token per sequence"):
        expand_and_rerank(torch.zeros(1, 1), fixed([1], [0.5]), width=1, depth=1, size=2)
    for tokens, confidences in [
        ((1, 1, 2), (1, 1, 3)),
        ((1, 2), (1, 2)),
        ((1, 1, 0), (1, 1, 0)),
        ((2, 1, 2), (2, 1, 2)),
    ]:
        with pytest.raises(ValueError, match=r"\[1, 1, C\]"):
            expand_and_rerank(
                torch.tensor([0]),
                lambda _, t=tokens, c=confidences: (torch.zeros(t, dtype=torch.int64), torch.zeros(c)),  # type: ignore[misc]
                width=1,
                depth=1,
                size=2,
            )
