"""Trees that are none, and draws that cannot be: refused, with a message that says where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree

FIXED, IID, INDEPENDENT, WITHOUT = Drawing.FIXED, Drawing.IID, Drawing.INDEPENDENT, Drawing.WITHOUT_REPLACEMENT


def laws(batch: int, rows: int, vocabulary: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(torch.randn(batch, rows, vocabulary, generator=generator), -1)


def build(parents: list[list[int]], drawing: Drawing = FIXED, **options: Any) -> DraftTree:
    batch, size = len(parents), len(parents[0])
    tokens = options.pop("tokens", (torch.arange(size) % 4).expand(batch, -1))
    return DraftTree.build(tokens, torch.tensor(parents), torch.zeros(batch, dtype=torch.int64), drawing, **options)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[0, 0]], "node 0 is the root"),
        ([[-1, 0], [1, 0]], "node 0 is the root"),
        ([[-1, 0, 1], [-1, 2, 0]], "sequence 1: node 1 has parent 2"),  # a parent after its child
        ([[-1, 2, 1]], "sequence 0: node 1 has parent 2.*cycle"),
        ([[-1, 1]], "node 1 has parent 1"),
        ([[-1, 0, 7]], "node 2 has parent 7"),
        ([[-1, -2]], "node 1 has parent -2"),
        ([[-1, 0, 1], [-1, -1, 1]], "sequence 1: the parent of node 2 is padding"),
    ],
)
@pytest.mark.parametrize("drawing", list(Drawing))
def test_bad_parents(parents: list[list[int]], message: str, drawing: Drawing) -> None:
    q = laws(len(parents), len(parents[0])) if drawing.sampled else None
    with pytest.raises(ValueError, match=message):
        build(parents, drawing, q=q)


@pytest.mark.parametrize(
    ("tokens", "parents", "roots"),
    [
        ((1, 3), (1, 2), (1,)),
        ((1, 3), (3,), (1,)),
        ((1, 3), (1, 3), (2,)),
        ((1, 3), (1, 3), ()),
        ((1, 3), (1, 3), (1, 1)),
        ((3,), (3,), (1,)),
        ((1, 2, 3), (1, 2, 3), (1,)),
        ((1, 0), (1, 0), (1,)),
    ],
)
def test_shapes_that_do_not_fit(tokens: tuple[int, ...], parents: tuple[int, ...], roots: tuple[int, ...]) -> None:
    zeros = [torch.full(shape, value) for shape, value in ((tokens, 0), (parents, -1), (roots, 0))]
    with pytest.raises(ValueError, match=r"do not fit: they must be \[B, N\]"):
        DraftTree.build(zeros[0], zeros[1], zeros[2], FIXED)


@pytest.mark.parametrize("width", [0, 1, 2])
def test_width_that_is_too_small(width: int) -> None:
    """The third child would otherwise become a child of the next node."""
    with pytest.raises(ValueError, match=f"width is {width}"):
        build([[-1, 0, 0, 0, 1]], width=width)
    assert build([[-1, 0, 0, 0, 1]], width=3).children[0, 0].tolist() == [1, 2, 3]
    assert build([[-1, 0, 0, 0, 1]], width=4).children[0, 0].tolist() == [1, 2, 3, -1]


def test_depth_bound_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="max_depth is 1, but the tree is 2 deep"):
        build([[-1, 0, 1]], max_depth=1)
    assert build([[-1, 0, 1]], max_depth=4).paths().shape == (1, 3, 4)


@pytest.mark.parametrize(
    "children",
    [
        [[2], [1], [-1]],  # swapped
        [[1], [-1], [1]],  # a child of two nodes
        [[0], [2], [-1]],  # the root is nobody's child
        [[1], [3], [-1]],  # outside
        [[1], [2], [-2]],
    ],
)
@pytest.mark.parametrize("drawing", [FIXED, IID])
def test_children_that_are_not(children: list[list[int]], drawing: Drawing) -> None:
    q = laws(1, 3) if drawing.sampled else None
    with pytest.raises(ValueError, match="is listed as a child of"):
        build([[-1, 0, 1]], drawing, q=q, children=torch.tensor([children]))


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 1), (2, 3, 1), (3, 1)])
def test_children_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"children .* must be \[B, N, K\]"):
        build([[-1, 0, 1]], children=torch.full(shape, -1))


@pytest.mark.parametrize("drawing", [IID, INDEPENDENT, WITHOUT])
def test_sampled_trees_need_q(drawing: Drawing) -> None:
    with pytest.raises(ValueError, match=f"drawn {drawing.value} needs q"):
        build([[-1, 0]], drawing)
    with pytest.raises(ValueError, match="needs q"):
        DraftTree.chain(torch.tensor([[1, 2]]), torch.tensor([0]), drawing)


def test_fixed_trees_have_no_q() -> None:
    with pytest.raises(ValueError, match="a fixed tree has no q"):
        build([[-1, 0]], q=laws(1, 2))
    with pytest.raises(ValueError, match="a fixed tree has no q"):
        build([[-1, 0]], q_rows=torch.zeros(1, 2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="a fixed tree has no q"):
        DraftTree.from_paths([0], [[[1]]], torch.tensor([0]), FIXED, q=laws(1, 1))


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 4), (4,), (1, 2, 4, 1)])
def test_q_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"q .* does not fit 1 sequences"):
        build([[-1, 0]], IID, q=torch.ones(shape) / 4)


def test_q_with_too_few_rows() -> None:
    assert build([[-1, 0, 1]], IID, q=laws(1, 2)).size == 3  # nothing is drawn at a leaf
    with pytest.raises(ValueError, match="q has 1 rows"):
        build([[-1, 0, 1]], IID, q=laws(1, 1))
    with pytest.raises(ValueError, match="q has 2 rows"):
        DraftTree.from_paths([0], [[[1, 2], [1, 2]]], torch.tensor([0]), INDEPENDENT, q=laws(1, 2))


@pytest.mark.parametrize("row", [-1, 2, 99])
def test_q_rows_outside_q(row: int) -> None:
    with pytest.raises(ValueError, match="q has 2 rows"):
        build([[-1, 0]], INDEPENDENT, q=laws(1, 2), q_rows=torch.tensor([[[row], [0]]]))


def test_q_rows_matter_only_where_something_was_drawn() -> None:
    for drawing in (IID, INDEPENDENT, WITHOUT):
        q = laws(1, 1).expand(1, 2, 4)
        children, rows = torch.tensor([[[1, 2], [-1, -1], [-1, -1]]]), torch.tensor([[[0, 1], [-1, -1], [9, -1]]])
        tree = build([[-1, 0, 0]], drawing, q=q, children=children, q_rows=rows)
        assert tree.width == 2


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 1, 1), (1, 2)])
def test_q_rows_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"q_rows .* must have the width of children"):
        build([[-1, 0]], IID, q=laws(1, 2), q_rows=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("token", [-1, 4, 1000])
def test_tokens_outside_the_vocabulary_of_q(token: int) -> None:
    tokens = torch.tensor([[1000, 1, token]])
    with pytest.raises(ValueError, match="outside q's vocabulary of 4"):
        build([[-1, 0, 0]], IID, q=laws(1, 3), tokens=tokens)
    # The root was not drafted, and padding is no token.
    assert build([[-1, 0, -1]], IID, q=laws(1, 3), tokens=tokens).size == 3


@pytest.mark.parametrize("drawing", [IID, WITHOUT])
def test_siblings_of_different_laws(drawing: Drawing) -> None:
    q, rows = laws(1, 3), torch.tensor([[[0, 1], [0, 0], [0, 0]]])
    with pytest.raises(ValueError, match=f"drawn {drawing.value} must share one law: use 'independent'"):
        build([[-1, 0, 0]], drawing, q=q, q_rows=rows)
    assert build([[-1, 0, 0]], INDEPENDENT, q=q, q_rows=rows).width == 2
    q[0, 1] = q[0, 0]
    assert build([[-1, 0, 0]], drawing, q=q, q_rows=rows).width == 2


def test_draws_with_a_gap() -> None:
    """The plain form would skip it and the batched form would stop there."""
    children = torch.tensor([[[-1, 1, 2], [-1] * 3, [-1] * 3]])
    with pytest.raises(ValueError, match="without gaps"):
        build([[-1, 0, 0]], IID, q=laws(1, 3), children=children)


def test_more_draws_than_announced() -> None:
    children = torch.tensor([[[1, 1, 2], [-1] * 3, [-1] * 3]])
    with pytest.raises(ValueError, match="max_draws is 2"):
        build([[-1, 0, 0]], IID, q=laws(1, 3), children=children, max_draws=2)
    assert build([[-1, 0, 0]], IID, q=laws(1, 3), children=children, max_draws=3).max_draws == 3


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -0.25, 3.0])
@pytest.mark.parametrize("drawing", [IID, INDEPENDENT, WITHOUT])
def test_a_q_the_token_cannot_have_come_from(drawing: Drawing, wrong: float) -> None:
    q = laws(1, 2)
    q[0, 0, 1] = wrong
    with pytest.raises(ValueError, match="probability that a drafted token was drawn with"):
        build([[-1, 0]], drawing, q=q)
    q[0, 0, 1], q[0, 1, 1] = 0.25, wrong  # nothing was drawn from the second row
    assert build([[-1, 0]], drawing, q=q).size == 2


def test_equal_siblings_without_replacement() -> None:
    tokens = torch.tensor([[0, 2, 2]])
    with pytest.raises(ValueError, match="different tokens"):
        build([[-1, 0, 0]], WITHOUT, q=laws(1, 3), tokens=tokens)
    assert build([[-1, 0, 0]], IID, q=laws(1, 3), tokens=tokens).size == 3
    assert build([[-1, 0, 1]], WITHOUT, q=laws(1, 3), tokens=tokens).size == 3


def test_iid_paths_of_different_models() -> None:
    with pytest.raises(ValueError, match="must share one law"):
        DraftTree.from_paths([0], [[[1], [2]]], torch.tensor([0]), IID, q=laws(1, 2))


def test_paths_are_not_drawn_without_replacement() -> None:
    with pytest.raises(ValueError, match="not drawn without replacement"):
        DraftTree.from_paths([0], [[[1]]], torch.tensor([0]), WITHOUT, q=laws(1, 1))


@pytest.mark.parametrize(("roots", "paths", "starts"), [(2, 1, 2), (1, 2, 1), (1, 1, 2), (2, 2, 1), (0, 0, 0)])
def test_paths_roots_and_positions_must_be_as_many(roots: int, paths: int, starts: int) -> None:
    with pytest.raises(ValueError, match=f"{roots} roots, paths for {paths} sequences and {starts} root positions"):
        DraftTree.from_paths([5] * roots, [[[1]]] * paths, torch.zeros(starts, dtype=torch.int64), FIXED)


def test_chains_that_are_none() -> None:
    with pytest.raises(ValueError, match="are no chains"):
        DraftTree.chain(torch.tensor([1, 2]), torch.tensor([0]), FIXED)
    for lengths in ([3], [-1], [1, 1], [[1]]):
        with pytest.raises(ValueError, match=r"lengths must be .* the 2 drafts"):
            DraftTree.chain(torch.tensor([[1, 2, 3]]), torch.tensor([0]), FIXED, lengths=torch.tensor(lengths))


def test_shapes_filled_wrongly() -> None:
    shape, roots = TreeShape((-1, 0, 1)), torch.tensor([0])
    for tokens in (torch.zeros(1, 2), torch.zeros(1, 4), torch.zeros(3), torch.zeros(1, 3, 1)):
        with pytest.raises(ValueError, match="do not fit a shape of 3 nodes"):
            DraftTree.from_shape(shape, tokens.long(), roots, FIXED)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="the parent of node 2 is padding"):
        DraftTree.from_shape(shape, tokens, roots, FIXED, present=torch.tensor([[True, False, True]]))
    for present in (torch.tensor([True] * 3), torch.tensor([[True]])):
        with pytest.raises(ValueError, match=r"present .* does not fit tokens"):
            DraftTree.from_shape(shape, tokens, roots, FIXED, present=present)


def test_unchecked_trees_read_no_device() -> None:
    """`check=False` takes the caller's word, which is what lets a tree be built without waiting for the device."""
    tree = build([[-1, 0, 0]], IID, q=laws(1, 1), q_rows=torch.full((1, 3, 2), 7), width=2, max_depth=1, check=False)
    assert tree.width == 2
