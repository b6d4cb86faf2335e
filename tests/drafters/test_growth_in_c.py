"""Trees that a head grows in C, in bytes: nearly those that it grows in PyTorch, and no deeper than pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.core.native import choice
from forerun.core.params import SamplingParams
from forerun.core.tree import DraftTree
from forerun.drafters import growth_in_c
from forerun.drafters.confidence import Taus
from forerun.drafters.drafter import Budget, Observation
from forerun.drafters.growth_in_c import GrowthInC, least_chance
from forerun.drafters.head_ahead import HeadAhead, HeadRun
from forerun.drafters.trained import FeatureDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.models.heads.feature_head import FeatureHead, frozen_head, new_head
from forerun.models.native.growth import LONGEST, Race, Text, TreeInC
from forerun.models.storage import Storage
from forerun.models.transformer import Transformer
from tests.drafters.models import paths_of, sequence
from tests.models.rows import each_pass, in_pytorch, round_matrices, threads
from tests.models.test_feature_head import CONFIG, target_of

METHODS = ("eagle", "eagle3", "mtp")
VOCABULARY, HIDDEN = CONFIG.vocab_size, CONFIG.hidden_size
GREEDY, SEEDED = SamplingParams(temperature=0.0), SamplingParams(seed=7, temperature=0.8)
Paths = set[tuple[int, ...]]

pytestmark = pytest.mark.skipif(choice.library() is None, reason="no compiler")


def head_of(method: str, target: Transformer) -> FeatureHead:
    head = frozen_head(new_head(method, target, ids=torch.arange(0, VOCABULARY, 2), inner=128), target)
    for part in ("q_proj", "v_proj", "o_proj"):  # so that what a row sees counts
        head.get_parameter(f"model.layers.0.self_attn.{part}.weight").data.mul_(2.5)
    head.lm_head.weight.data.mul_(4)  # and some candidates are better than others
    return head


def live(
    head: FeatureHead,
    params: SamplingParams = GREEDY,
    tree: str = "dynamic:3,4,12",
    steps: int = 12,
    added: int = 3,
    nodes: int = 99,
) -> list[Paths]:
    """What is drafted while a text is written that does not depend on the drafts."""
    drafter = FeatureDrafter(head, 1024, TreeSpec.parse(tree), VOCABULARY, Taus(1.3, 0.7))
    text = sequence(1, params, length=9, vocabulary=VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    found: list[Paths] = []
    start = 0
    for step in range(steps):
        if step:
            grown = drafter.draft([text], [Budget(nodes, 9)])
            found.append(set(paths_of(grown, 0)))
        text.commit(torch.randint(VOCABULARY, (1 + step % added,), generator=generator).tolist())
        rows = text.position - start
        seen = {layer: torch.randn(rows, HIDDEN, generator=generator).to(head.dtype) for layer in drafter.layers}
        drafter.observe([Observation(text, [], seen, start)])
        start = text.position
    return found


def agreement(found: list[Paths], expected: list[Paths]) -> float:
    """The share of paths that both have."""
    pairs = list(zip(found, expected, strict=True))
    return sum(len(one & other) for one, other in pairs) / sum(len(one | other) for one, other in pairs)


@each_pass
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_trees_are_nearly_those_of_pytorch(
    dtype: torch.dtype, method: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes and in C, and on a machine without a pass in C."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    target = target_of(dtype)
    head = head_of(method, target)
    found = live(head, params)
    assert head.in_c is not None
    assert head.in_c.in_bytes
    expected = live(in_pytorch(head_of(method, target)), params)
    assert sum(map(len, expected)) > 100
    assert agreement(found, expected) > 0.85
    if dtype == torch.float32:  # where nothing but the weights is rounded
        assert agreement(found, live(in_pytorch(round_matrices(head_of(method, target), dtype)), params)) > 0.99
    assert agreement(found, expected[1:] + expected[:1]) < 0.5, "trees of other texts are others"


@each_pass
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("added", [3, 29])
def test_a_text_outgrows_the_memory_that_was_made_for_it(
    dtype: torch.dtype, method: str, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same arithmetic, level by level in tensors: the very same trees, however long the text gets."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    target = target_of(dtype)
    found = live(head_of(method, target), steps=40, added=added)
    monkeypatch.setattr(HeadRun, "grow", lambda *given: None)
    expected = live(head_of(method, target), steps=40, added=added)
    if dtype == torch.float32:
        assert found == expected
    else:
        assert agreement(found, expected) > 0.97  # equal candidates come in any order


@each_pass
@pytest.mark.parametrize("tree", ["dynamic:3,4,12", "dynamic:8,5,60"])
@pytest.mark.parametrize("nodes", [2, 3, 6, 99])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_trees_of_any_size_are_those_of_plain_numbers(
    dtype: torch.dtype, method: str, params: SamplingParams, tree: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the same pass."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    target = target_of(dtype)
    found = live(head_of(method, target), params, tree, nodes=nodes)
    monkeypatch.setattr(GrowthInC, "takes", lambda *given: False)
    expected = live(head_of(method, target), params, tree, nodes=nodes)
    if dtype == torch.float32:
        assert found == expected
    else:
        assert agreement(found, expected) > 0.97  # equal candidates come in any order


@each_pass
@pytest.mark.parametrize("size", [3, 4, 7, 20])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_small_tree_is_the_best_of_a_large_one(
    dtype: torch.dtype, params: SamplingParams, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though not all of the large one's nodes are read for it."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    grow, read = TreeInC.grow, [0, 0]

    def compared(
        tree: TreeInC, text: Text, race: Race | None, storage: Storage, size: int, *more: float
    ) -> tuple[list[int], list[int], list[float]]:
        grown = []
        for number, nodes in enumerate((1000, size)):
            below = torch.from_numpy(text.slots[text.length :])
            storage.whole[:, below] = torch.nan  # type: ignore[index]
            grown.append(grow(tree, text, race, storage, nodes, *more))  # type: ignore[arg-type]
            read[number] += int(storage.whole[0, below, 0, 0, 0].isfinite().sum())  # type: ignore[index]
        whole, part = grown
        assert len(whole[0]) > size
        assert part == tuple(values[:size] for values in whole)
        return part

    monkeypatch.setattr(TreeInC, "grow", compared)
    live(head_of("eagle3", target_of(dtype)), params, "dynamic:5,4,30", nodes=size - 1)
    assert read[1] < read[0]


@each_pass
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    target = target_of(dtype)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(live(head_of("eagle3", target), SEEDED))
    assert found[0] == found[1] == found[2]


@each_pass
def test_more_rows_than_there_is_memory_for_are_left_to_others(dtype: torch.dtype) -> None:
    head = head_of("eagle3", target_of(dtype))
    growth, spec = HeadAhead(head, 64).in_c, TreeSpec.parse("dynamic:3,4,12")
    assert growth.takes(spec, LONGEST)
    assert not growth.takes(spec, LONGEST + 1)
    assert not growth.takes(TreeSpec.parse("fixed:3,2"), 1)


@each_pass
def test_a_tree_may_ask_for_more_nodes_than_can_grow(dtype: torch.dtype) -> None:
    trees = live(head_of("eagle3", target_of(dtype)), tree="dynamic:2,2,60", steps=4)
    assert all(len(paths) <= 7 for paths in trees)


@each_pass
def test_trees_stay_wide_at_low_temperatures(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the draft thinks impossible by then the target may still take."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    for temperature in (0.1, 1e-9):
        trees = live(head_of("eagle3", target_of(dtype)), replace(SEEDED, temperature=temperature))
        assert sum(map(len, trees)) > 9 * len(trees)


@each_pass
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_column_that_is_no_number_is_not_drafted(dtype: torch.dtype, params: SamplingParams) -> None:
    head = head_of("eagle3", target_of(dtype))
    liked = max(path[-1] for tree in live(head_of("eagle3", target_of(dtype)), params) for path in tree if path)
    head.lm_head.weight.data[liked // 2] = torch.nan  # the draft vocabulary is every other token
    drafted = {token for tree in live(head, params) for path in tree for token in path}
    assert liked not in drafted
    assert len(drafted) > 5


# --- how deep --------------------------------------------------------------------------------------------------


def depth_of(trees: list[Paths]) -> list[int]:
    return [max(map(len, paths)) for paths in trees]


@each_pass
def test_a_tree_ends_where_the_text_hardly_gets(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(dtype)
    depths = []
    for least in (0.0, 0.3, 1.1):
        monkeypatch.setattr(growth_in_c, "least_chance", lambda head, least=least: least)
        depths.append(depth_of(live(head_of("eagle3", target), tree="dynamic:3,6,60")))
    whole, some, one = depths
    assert set(whole) == {6}
    assert set(one) == {1}, "the candidates of the root are there before anybody asks"
    assert len(set(some)) > 1
    assert 1 < sum(some) / len(some) < 6


@each_pass
def test_a_small_head_may_go_deeper_than_a_large_one(dtype: torch.dtype) -> None:
    target = target_of(dtype)
    small, large = head_of("eagle3", target), head_of("mtp", target)
    for head in (small, large):
        head.prepare()
    assert least_chance(small) == growth_in_c.HIGHEST_LEAST, "of so small a target every head is a large part"
    big = replace(CONFIG, layers=CONFIG.layers * 100)
    target.config = big
    assert 0 < least_chance(small) < 0.1
    assert GrowthInC(small).least == least_chance(small)


@each_pass
def test_a_draft_tree_holds_what_grew(dtype: torch.dtype) -> None:
    """One tree, with its root first and every parent before its children."""
    head = head_of("mtp", target_of(dtype))
    drafter = FeatureDrafter(head, 256, TreeSpec.parse("dynamic:3,4,9"), VOCABULARY)
    text = sequence(2, GREEDY, length=9, vocabulary=VOCABULARY)
    text.commit([5])
    states = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    drafter.observe([Observation(text, [5], dict.fromkeys(drafter.layers, states), 0)])
    tree: DraftTree = drafter.draft([text], [Budget(9, 4)])
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    assert tokens[0] == 5
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    assert len(tokens) <= 10
