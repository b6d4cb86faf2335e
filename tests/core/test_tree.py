"""`DraftTree` against per-node brute force: tables, paths, padding and the constructors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.core.drawing import Drawing
from forerun.core.shape import TreeShape
from forerun.core.tree import DraftTree

VOCABULARY = 6
FIXED, IID, INDEPENDENT, WITHOUT = Drawing.FIXED, Drawing.IID, Drawing.INDEPENDENT, Drawing.WITHOUT_REPLACEMENT


@st.composite
def parent_rows(draw: st.DrawFn, size: int) -> list[int]:
    """Parents of one padded tree; padding may come anywhere, and never has children."""
    parents = [-1]
    for node in range(1, size):
        real = [other for other in range(node) if other == 0 or parents[other] >= 0]
        parents.append(draw(st.sampled_from([-1, *real])))
    return parents


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Parents and tokens of a batch."""
    size, batch = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    parents = [draw(parent_rows(size)) for _ in range(batch)]
    tokens = [draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size)) for _ in range(batch)]
    return parents, tokens


def lineage(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def laws(batch: int, rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(batch, rows, vocabulary, generator=generator, dtype=torch.float64), -1)


@settings(max_examples=150, deadline=None)
@given(forests())
def test_tables_equal_brute_force(forest: tuple[list[list[int]], list[list[int]]]) -> None:
    parents, tokens = forest
    batch, size = len(parents), len(parents[0])
    starts = torch.arange(batch) * 100 + 7
    tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), starts, FIXED)
    assert (tree.batch, tree.size) == (batch, size)
    deepest = widest = 0
    paths = tree.paths()
    for b, row in enumerate(parents):
        for node in range(size):
            line = lineage(row, node)
            deepest = max(deepest, len(line) - 1)
            assert int(tree.depths[b, node]) == len(line) - 1
            assert int(tree.positions[b, node]) == b * 100 + 7 + len(line) - 1
            assert tree.ancestors[b, node].nonzero().flatten().tolist() == line
            assert bool(tree.present[b, node]) == (node == 0 or row[node] >= 0)
            children = [child for child in range(1, size) if row[child] == node]
            widest = max(widest, len(children))
            table = tree.children[b, node].tolist()
            assert table == children + [-1] * (tree.width - len(children))
            path = [tokens[b][step] for step in line[1:]]
            assert paths[b, node].tolist() == path + [-1] * (tree.max_depth - len(path))
    assert (tree.max_depth, tree.width) == (deepest, widest)
    assert tree.max_draws >= max(
        sum(row[child] == step for step in lineage(row, node) for child in range(size))
        for row in parents
        for node in range(size)
    )


@settings(max_examples=100, deadline=None)
@given(forests(), st.integers(1, 4))
def test_padding_changes_nothing(forest: tuple[list[list[int]], list[list[int]]], extra: int) -> None:
    """A tree alone and the same tree padded at its end, inside a batch: the same content."""
    parents, tokens = (torch.tensor(part) for part in forest)
    batch, size = parents.shape
    q = laws(batch, size)
    starts = torch.arange(batch)
    padded = DraftTree.build(
        torch.cat([tokens, torch.full((batch, extra), 300)], 1),
        torch.cat([parents, torch.full((batch, extra), -1)], 1),
        starts,
        IID,
        q=torch.cat([q, laws(batch, extra, seed=1)], 1),
    )
    for b in range(batch):
        alone = DraftTree.build(tokens[b : b + 1], parents[b : b + 1], starts[b : b + 1], IID, q=q[b : b + 1])
        row = padded.take(torch.tensor([b]))
        for name in ("tokens", "parents", "depths", "positions", "present"):
            assert torch.equal(getattr(row, name)[:, :size], getattr(alone, name)), name
        assert torch.equal(row.ancestors[:, :size, :size], alone.ancestors)
        assert not bool(row.ancestors[:, :size, size:].any() | row.ancestors[:, size:, :size].any())
        assert torch.equal(row.children[:, :size, : alone.width], alone.children)
        assert bool((row.children[:, :size, alone.width :] == -1).all() & (row.children[:, size:] == -1).all())
        assert torch.equal(row.paths()[:, :size, : alone.max_depth], alone.paths())
        assert not bool(row.present[:, size:].any())


def test_take_picks_repeats_and_reorders() -> None:
    shape = TreeShape((-1, 0, 0, 1))
    tokens = torch.arange(12).view(3, 4) % VOCABULARY
    tree = DraftTree.from_shape(shape, tokens, torch.tensor([5, 6, 7]), IID, q=laws(3, 4))
    rows = torch.tensor([2, 0, 2])
    taken = tree.take(rows)
    again = DraftTree.from_shape(shape, tokens[rows], torch.tensor([7, 5, 7]), IID, q=laws(3, 4)[rows])
    assert taken.drawing is IID
    assert (taken.max_depth, taken.max_draws, taken.batch) == (2, 3, 3)
    for name in ("tokens", "parents", "depths", "positions", "ancestors", "children", "q", "q_rows"):
        assert torch.equal(getattr(taken, name), getattr(again, name)), name
    fixed = DraftTree.from_shape(shape, tokens, torch.tensor([5, 6, 7]), FIXED).take(torch.tensor([1]))
    assert fixed.q is None
    assert fixed.positions.tolist() == [[6, 7, 7, 8]]


def test_long_chain_has_all_its_ancestors() -> None:
    """Reachability is found by doubling: a chain is its worst case, also where its length is no power of two."""
    for size in (1, 2, 3, 17, 64, 65):
        tree = DraftTree.chain(torch.zeros(1, size, dtype=torch.int64), torch.tensor([0]), FIXED)
        assert torch.equal(tree.ancestors[0], torch.ones(size, size).tril() > 0)
        assert tree.depths[0].tolist() == list(range(size))


# --- chain ---------------------------------------------------------------------------------------------------


def test_chain_with_lengths() -> None:
    tokens = torch.tensor([[9, 1, 2, 3], [8, 1, 0, 0], [7, 0, 0, 0]])
    tree = DraftTree.chain(tokens, torch.tensor([4, 5, 6]), IID, q=laws(3, 3), lengths=torch.tensor([3, 1, 0]))
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1], [-1, -1, -1, -1]]
    assert tree.children.squeeze(-1).tolist() == [[1, 2, 3, -1], [1, -1, -1, -1], [-1, -1, -1, -1]]
    assert tree.present.sum(-1).tolist() == [4, 2, 1]
    assert tree.paths()[0, 3].tolist() == [1, 2, 3]
    assert tree.paths()[1, 1].tolist() == [1, -1, -1]
    assert tree.q_rows is not None
    assert tree.q_rows[0, :3, 0].tolist() == [0, 1, 2]  # row i is the law after node i


def test_chain_without_lengths_is_full() -> None:
    tokens = torch.tensor([[9, 1, 2], [8, 3, 4]])
    full = DraftTree.chain(tokens, torch.tensor([0, 0]), FIXED, lengths=torch.tensor([2, 2]))
    tree = DraftTree.chain(tokens, torch.tensor([0, 0]), FIXED)
    assert torch.equal(tree.parents, full.parents)
    assert tree.max_depth == 2


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    tree = DraftTree.chain(torch.tensor([[3], [4]]), torch.tensor([10, 0]), FIXED)
    assert (tree.size, tree.max_depth, tree.max_draws) == (1, 0, 0)
    assert tree.paths().shape == (2, 1, 0)
    assert tree.positions.tolist() == [[10], [0]]
    sampled = DraftTree.chain(torch.tensor([[3]]), torch.tensor([10]), IID, q=torch.zeros(1, 0, VOCABULARY))
    assert sampled.present.tolist() == [[True]]


# --- static shapes -------------------------------------------------------------------------------------------


def test_shape_with_absent_nodes_closes_ranks() -> None:
    #      0
    #   1  2  3
    #  4 5    6
    shape = TreeShape((-1, 0, 0, 0, 1, 1, 3))
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 1]] * 2)
    present = torch.tensor([[True] * 7, [True, True, False, True, False, True, True]])
    tree = DraftTree.from_shape(shape, tokens, torch.tensor([0, 9]), IID, q=laws(2, 7), present=present)
    assert torch.equal(tree.present, present)
    assert tree.children[0].tolist()[:4] == [[1, 2, 3], [4, 5, -1], [-1, -1, -1], [6, -1, -1]]
    assert tree.children[1].tolist()[:4] == [[1, 3, -1], [5, -1, -1], [-1, -1, -1], [6, -1, -1]]
    assert tree.depths[1].tolist() == [0, 1, 0, 1, 0, 2, 2]
    assert (tree.max_depth, tree.width) == (2, 3)
    assert tree.paths()[1, 6].tolist() == [3, 1]


def test_shape_keeps_its_bounds_when_all_is_absent() -> None:
    shape = TreeShape((-1, 0, 0, 1))
    present = torch.tensor([[True, False, False, False]])
    tree = DraftTree.from_shape(shape, torch.full((1, 4), -1), torch.tensor([0]), FIXED, present=present)
    assert bool((tree.children == -1).all())
    assert tree.paths().shape == (1, 4, 2)
    assert bool((tree.paths() == -1).all())


# --- lists of paths ------------------------------------------------------------------------------------------

Paths = list[list[list[int]]]
PATHS = st.lists(
    st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=4),
    min_size=1,
    max_size=3,
)


def node_texts(tree: DraftTree, b: int) -> dict[int, tuple[int, ...]]:
    """Which drafted text each present node stands for."""
    return {
        node: tuple(token for token in tree.paths()[b, node].tolist() if token >= 0)
        for node in range(tree.size)
        if bool(tree.present[b, node])
    }


@settings(max_examples=150, deadline=None)
@given(PATHS)
def test_merged_paths_keep_every_draw_and_its_law(paths: Paths) -> None:
    most, longest = max(map(len, paths)), max((len(path) for row in paths for path in row), default=0)
    q = laws(len(paths), most * longest, 3)
    roots = [5 + b for b in range(len(paths))]
    tree = DraftTree.from_paths(roots, paths, torch.arange(len(paths)) * 10, INDEPENDENT, q=q)
    assert tree.tokens[:, 0].tolist() == roots
    assert tree.q_rows is not None
    assert tree.q is not None
    for b, row in enumerate(paths):
        texts = node_texts(tree, b)
        prefixes = {tuple(path[:depth]) for path in row for depth in range(len(path) + 1)} | {()}
        assert sorted(texts.values()) == sorted(prefixes)  # every text once: equal beginnings are merged
        for node, text in texts.items():
            # One draw for each path that goes through here, in the order of the paths.
            drawn = [
                (path[len(text)], index * longest + len(text))
                for index, path in enumerate(row)
                if len(path) > len(text) and tuple(path[: len(text)]) == text
            ]
            children = [child for child in tree.children[b, node].tolist() if child >= 0]
            assert [texts[child] for child in children] == [(*text, token) for token, _ in drawn]
            for rank, (_, law_row) in enumerate(drawn):
                got = tree.q[b, int(tree.q_rows[b, node, rank])]
                assert torch.equal(got, q[b, law_row])
    most_draws = max(sum(map(len, row)) for row in paths)
    assert tree.max_draws == most_draws


@settings(max_examples=80, deadline=None)
@given(PATHS)
def test_fixed_paths_name_each_child_once(paths: Paths) -> None:
    tree = DraftTree.from_paths([0] * len(paths), paths, torch.zeros(len(paths), dtype=torch.int64), FIXED)
    assert tree.q is None
    for b, row in enumerate(paths):
        texts = node_texts(tree, b)
        for node, text in texts.items():
            following = [path[len(text)] for path in row if len(path) > len(text) and tuple(path[: len(text)]) == text]
            children = [texts[child][-1] for child in tree.children[b, node].tolist() if child >= 0]
            assert children == list(dict.fromkeys(following))  # first seen first


@settings(max_examples=60, deadline=None)
@given(PATHS)
def test_merged_paths_do_not_depend_on_the_batch(paths: Paths) -> None:
    """Alone, a sequence has its own P and D: other rows of q, the same laws and draws."""
    most, longest = max(map(len, paths)), max((len(path) for row in paths for path in row), default=0)
    q = laws(len(paths), most * longest, 3)
    together = DraftTree.from_paths([0] * len(paths), paths, torch.arange(len(paths)), INDEPENDENT, q=q)
    assert together.q is not None
    assert together.q_rows is not None
    for b, row in enumerate(paths):
        own = max(map(len, row), default=0)
        own_q = q[b].view(most, longest, 3)[: len(row), :own].reshape(1, -1, 3)
        alone = DraftTree.from_paths([0], [row], torch.tensor([b]), INDEPENDENT, q=own_q)
        assert alone.q is not None
        assert alone.q_rows is not None
        assert torch.equal(together.parents[b, : alone.size], alone.parents[0])
        assert torch.equal(together.tokens[b, : alone.size], alone.tokens[0])
        assert torch.equal(together.children[b, : alone.size, : alone.width], alone.children[0])
        assert bool((together.children[b, :, alone.width :] == -1).all())
        for node, rank in (alone.children[0] >= 0).nonzero().tolist():
            here = together.q[b, int(together.q_rows[b, node, rank])]
            assert torch.equal(here, alone.q[0, int(alone.q_rows[0, node, rank])])


def test_merged_paths_by_hand() -> None:
    paths = [[[1, 2], [1, 0], [1, 2], [0]]]
    q = laws(1, 8, 3)
    tree = DraftTree.from_paths([7], paths, torch.tensor([3]), INDEPENDENT, q=q)
    assert tree.tokens.tolist() == [[7, 1, 0, 2, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert tree.children[0, :2].tolist() == [[1, 1, 1, 2], [3, 4, 3, -1]]
    assert tree.q_rows is not None
    assert tree.q_rows[0, 0].tolist() == [0, 2, 4, 6]
    assert tree.q_rows[0, 1, :3].tolist() == [1, 3, 5]
    assert tree.positions.tolist() == [[3, 4, 4, 5, 5]]
    fixed = DraftTree.from_paths([7], paths, torch.tensor([3]), FIXED)
    assert fixed.children[0, :2].tolist() == [[1, 2], [3, 4]]


def test_no_paths_are_plain_decoding() -> None:
    for drawing, q in ((FIXED, None), (IID, torch.zeros(2, 0, 3)), (INDEPENDENT, torch.zeros(2, 0, 3))):
        tree = DraftTree.from_paths([4, 5], [[], [[]]], torch.tensor([0, 1]), drawing, q=q)
        assert (tree.size, tree.width, tree.max_depth, tree.max_draws) == (1, 0, 0, 0)
        assert tree.tokens.tolist() == [[4], [5]]


def test_iid_paths_may_name_different_rows_of_equal_laws() -> None:
    q = laws(1, 1, 3).expand(1, 2, 3).contiguous()
    tree = DraftTree.from_paths([0], [[[1], [1]]], torch.tensor([0]), IID, q=q)
    assert tree.children.tolist() == [[[1, 1], [-1, -1]]]


@pytest.mark.parametrize("drawing", list(Drawing))
def test_only_fixed_drawings_are_not_sampled(drawing: Drawing) -> None:
    assert drawing.sampled == (drawing.value != "fixed")
