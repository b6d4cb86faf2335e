"""Silent nodes: rows of the target's pass, and padding to everyone else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.drawing import Drawing
from forerun.core.noise import StepNoise
from forerun.core.tree import DraftTree
from forerun.verify.plain import PlainTree, SequenceNoise
from forerun.verify.rule import all_rules

VOCABULARY = 6
Tree = tuple[list[int], list[int]]
COLUMNS = ("tokens", "parents", "depths", "positions", "ancestors")


@st.composite
def trees(draw: st.DrawFn, *, branches: bool = True) -> tuple[Tree, Tree]:
    """A tree of different siblings, and the same with silent nodes at its end."""
    tokens, parents = [draw(st.integers(0, VOCABULARY - 1))], [-1]
    for node in range(1, draw(st.integers(1, 6))):
        parent = draw(st.integers(0, node - 1)) if branches else node - 1
        elder = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        tokens.append(draw(st.sampled_from([token for token in range(VOCABULARY) if token not in elder])))
        parents.append(parent)
    more_tokens, more_parents = list(tokens), list(parents)
    for _ in range(draw(st.integers(0, 5))):
        more_parents.append(draw(st.integers(0, len(more_parents) - 1)))
        more_tokens.append(VOCABULARY + draw(st.integers(0, 3)))
    return (tokens, parents), (more_tokens, more_parents)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_silent_nodes_are_padding_but_for_the_pass(forest: list[tuple[Tree, Tree]]) -> None:
    starts = [7 + 10 * b for b in range(len(forest))]
    bare = DraftTree.of_lists([heard for heard, _ in forest], starts)
    silent = [len(whole[0]) - len(heard[0]) for heard, whole in forest]
    tree = DraftTree.of_lists([whole for _, whole in forest], starts, silent)
    assert [(tokens, parents) for _, tokens, parents in tree.lists()] == [heard for heard, _ in forest]
    assert [(tokens, parents) for _, tokens, parents in tree.rows()] == [whole for _, whole in forest]
    assert [nodes for nodes, _, _ in tree.rows()] == [list(range(len(whole[0]))) for _, whole in forest]
    assert tree.any_drafts == bare.any_drafts == any(len(heard[0]) > 1 for heard, _ in forest)
    assert bare.any_drafts == (bare.max_depth > 0)
    assert (tree.silent, bare.silent, bare.rows()) == (silent, [0] * len(forest), bare.lists())
    assert tree.size == max(len(whole[0]) for _, whole in forest)
    assert (tree.max_depth, tree.max_draws, tree.width) == (bare.max_depth, bare.max_draws, bare.width)
    for b, (heard, _) in enumerate(forest):
        size = len(heard[0])
        for name in COLUMNS:
            found, wanted = getattr(tree, name)[b], getattr(bare, name)[b]
            part = (slice(size),) * wanted.dim()
            assert torch.equal(found[part], wanted[part]), name
        assert torch.equal(tree.children[b, :size], bare.children[b, :size])
        assert tree.tokens[b, size:].tolist() == [0] * (tree.size - size)
        assert tree.present[b].tolist() == [True] * size + [False] * (tree.size - size)
        assert not (tree.children[b] >= size).any()
        assert torch.equal(tree.paths()[b, :size], bare.paths()[b, :size])
        assert bool((tree.paths()[b, size:] == -1).all())
        assert tree.take(torch.tensor([b])).lists()[0][1:] == heard
    DraftTree.build(tree.tokens, tree.parents, torch.tensor(starts), tree.drawing, children=tree.children)


@pytest.mark.parametrize("name", [name for name, rule in all_rules().items() if Drawing.FIXED in rule.drawings])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**40))
def test_no_rule_hears_silent_nodes(name: str, data: st.DataObject, seed: int) -> None:
    rule = all_rules()[name]
    heard, whole = data.draw(trees(branches=not rule.chain_only))
    silent = len(whole[0]) - len(heard[0])
    bare, tree = DraftTree.of_lists([heard], [5]), DraftTree.of_lists([whole], [5], [silent])
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(1, tree.size, VOCABULARY, generator=generator), -1)
    noise = StepNoise(torch.tensor([seed]), torch.tensor([6]))
    wanted = rule.verify(bare, p[:, : bare.size], noise)
    found = rule.verify(tree, p, noise)
    assert found.committed(tree.tokens).tolist() == wanted.committed(bare.tokens).tolist()
    assert int(found.stops) == int(wanted.stops) < len(heard[0])
    plain = rule.reference(PlainTree.of(tree, 0), list(p[0].numpy()), SequenceNoise(noise, 0, VOCABULARY))
    assert (list(plain.path), plain.token) == (found.nodes[0, : int(found.lengths)].tolist(), int(found.tokens))


def test_a_root_is_never_silent() -> None:
    with pytest.raises(AssertionError, match="a root is heard"):
        DraftTree.of_lists([([1, 2], [-1, 0])], [0], [2])
