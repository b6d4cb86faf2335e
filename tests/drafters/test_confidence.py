"""What trees tell of their nodes: the share that the drafter itself gives a token behind the path to it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.core.native import choice
from forerun.core.noise import StepNoise
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.step_record import SequenceRecord, StepRecord
from forerun.core.tree import DraftTree
from forerun.drafters import confidence, growth_in_c, parallel, retrieval
from forerun.drafters.confidence import Taus
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import make_drafter
from forerun.drafters.growth_in_c import GrowthInC
from forerun.drafters.head_ahead import HeadRun
from forerun.drafters.multi_draft import MultiDraft
from forerun.drafters.parallel import Ranks, falling
from forerun.drafters.run_ahead import RunAhead
from forerun.drafters.suffix import Suffix
from forerun.drafters.trained import FeatureDrafter, SideDrafter
from forerun.drafters.tree_spec import TreeSpec
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.heads.feature_head import FeatureHead
from forerun.models.heads.side_heads import SideHeads
from forerun.models.transformer import Transformer
from tests.drafters import test_growth_in_c, test_parallel, test_retrieval
from tests.drafters.contract import REQUESTS
from tests.drafters.models import VOCABULARY, accept_some, paths_of, sequence, setup, slow_law, tiny
from tests.drafters.test_growing import ACCURACIES, TREES
from tests.drafters.test_heads import FEATURE, SIDE, shaken, slow_logits
from tests.engine.tiny import drain, tiny_model
from tests.models.rows import each_pass
from tests.models.test_feature_head import target_of

AMPLE = Budget(64, 64)
LAWS = {
    "plain": (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=7),
        SamplingParams(seed=8, temperature=0.7, top_p=0.9),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.0, logit_bias={3: 2.0}),
    ),
    "greedy": (SamplingParams(temperature=0.0),) * 2,
    "seeded": (SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.5)),
    "penalties": REQUESTS,
}
Told = dict[tuple[int, ...], float]


def told_of(tree: DraftTree, row: int) -> Told:
    """By path, the confidence of each node that is there."""
    told = tree.confidences()[row]
    assert told is not None
    nodes = [0, *(tree.parents[row] >= 0).nonzero().flatten().tolist()]
    return dict(zip(paths_of(tree, row), [told[node] for node in nodes], strict=True))


def share(model: Transformer, text: Sequence, path: tuple[int, ...], taus: Taus) -> float:
    """Of the last token of a path, in what the model thinks behind the others."""
    params = text.params
    if params.greedy:
        params = replace(params, temperature=taus.greedy, top_k=0, top_p=1.0, min_p=0.0)
    scores = slow_law(model, text, list(path[:-1]), params, VOCABULARY).double()
    if text.coupled:
        noise = StepNoise(torch.tensor([text.seed]), torch.tensor([text.position + 1]))
        scores = (scores / noise.race(torch.tensor([len(path) - 1]), VOCABULARY)[0]) ** (1 / taus.coupled)
    return float(scores[path[-1]] / scores.sum())


# --- what grows from laws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", LAWS)
@pytest.mark.parametrize("tree", TREES)
def test_a_node_has_the_share_that_its_model_gives_it(tree: str, requests: str) -> None:
    """Asked when the texts have grown, as a trace does."""
    model, taus = tiny(1), Taus(1.4, 0.7)
    drafter = DraftModel(RunAhead(model, 4096), TreeSpec.parse(tree), VOCABULARY, ACCURACIES, taus)
    texts = [sequence(number, params) for number, params in enumerate(LAWS[requests])]
    made = drafter.draft(texts, [AMPLE] * len(texts))
    expected = [
        {path: share(model, text, path, taus) if path else 1.0 for path in paths_of(made, row)}
        for row, text in enumerate(texts)
    ]
    for text in texts:
        text.commit([1, 2, 3])
    for row, text in enumerate(texts):
        if requests == "penalties" and text.params.greedy and not drafter.branches:  # a law of one token says nothing
            assert made.confidences()[row] is None
        else:
            assert told_of(made, row) == pytest.approx(expected[row], rel=2e-3)
    assert sum(map(len, expected)) > 3 * len(texts)


def refuse(*given: object) -> Tensor:
    raise AssertionError("computed")


@pytest.mark.parametrize("tree", ["fixed:3,2,1", "2"])
def test_shares_are_computed_when_somebody_asks(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confidence, "log_shares", refuse)
    drafter = DraftModel(RunAhead(tiny(1), 4096), TreeSpec.parse(tree), VOCABULARY)
    made = drafter.draft([sequence(1, SamplingParams(temperature=0.0))], [AMPLE])
    with pytest.raises(AssertionError, match="computed"):
        made.confidences()


def test_what_a_tree_grew_by_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DraftModel(RunAhead(tiny(1), 4096), TreeSpec.parse("dynamic:3,3,8"), VOCABULARY)
    made = drafter.draft([sequence(1, SamplingParams(temperature=0.0))], [AMPLE])
    monkeypatch.setattr(confidence, "log_shares", refuse)
    assert len(told_of(made, 0)) == 9


def test_several_drafts_tell_the_law_that_a_token_was_first_drawn_from() -> None:
    models = [tiny(1), tiny(2)]
    drafter = MultiDraft(models, 1, 3, VOCABULARY, 2048)
    text = sequence(4, SamplingParams(temperature=0.8))
    tree = drafter.draft([text], [AMPLE])
    told = told_of(tree, 0)
    assert len(told) > 4
    for path, found in told.items():
        if path:
            shares = [share(model, text, path, Taus()) for model in models]
            assert min(abs(found - own) for own in shares) < 1e-4
    greedy = drafter.draft([text, sequence(5, SamplingParams(temperature=0.0))], [AMPLE, AMPLE])
    assert [own is None for own in greedy.confidences()] == [False, True]


# --- heads, in a trace ------------------------------------------------------------------------------------------


def traced(target: Transformer, drafter: Drafter, requests: list[Request]) -> list[tuple[list[int], SequenceRecord]]:
    """The parts of all steps, each with the text that it began with."""
    steps: list[StepRecord] = []
    drain(Engine(target, drafter, slots=1024, trace=steps.append), requests)
    texts = [list(request.prompt) for request in requests]
    found = []
    for step in steps:
        for part in step.sequences:
            found.append((list(texts[part.request]), part))
            texts[part.request] += part.committed
    return found


def ways_of(part: SequenceRecord) -> list[list[int]]:
    ways: list[list[int]] = [[]]
    for node, parent in enumerate(part.parents[1:], start=1):
        ways.append([*ways[parent], part.tokens[node]])
    return ways


@pytest.mark.parametrize("tree", ["3", "fixed:2,2", "dynamic:3,3,7"])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("method", [*FEATURE, *SIDE])
def test_traces_hold_the_shares_of_a_head(method: str, narrow: bool, tree: str) -> None:
    target = tiny_model()
    head = shaken(method, target, torch.arange(0, target.vocab_size, 2) if narrow else None)
    spec = TreeSpec.parse(tree)
    drafter: Drafter
    if isinstance(head, SideHeads):
        drafter = SideDrafter(head, spec, target.vocab_size)
    else:
        drafter = FeatureDrafter(head, 1024, spec, target.vocab_size)
    greedy = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    compared = 0
    for text, part in traced(target, drafter, [Request([3, 1, 4, 1, 5], greedy), Request([9, 2], greedy)]):
        if len(part.tokens) < 2:
            continue
        assert part.confidences is not None
        assert part.confidences[0] == 1.0
        assert text[-1] == part.tokens[0]
        for way, found in zip(ways_of(part)[1:], part.confidences[1:], strict=True):
            said = slow_logits(head, target, text, way[:-1]).double().softmax(-1)
            column = way[-1] if head.ids is None else head.ids.tolist().index(way[-1])
            assert found == pytest.approx(float(said[column]), rel=2e-3)
            compared += 1
    assert compared >= 12


# --- the ways to grow a tree ------------------------------------------------------------------------------------


def told_in_life(head: FeatureHead, params: SamplingParams) -> list[Told]:
    """Of the trees behind a text that does not depend on them."""
    vocabulary, hidden = test_growth_in_c.VOCABULARY, test_growth_in_c.HIDDEN
    drafter = FeatureDrafter(head, 1024, TreeSpec.parse("dynamic:3,4,12"), vocabulary, Taus(1.3, 0.7))
    text = sequence(1, params, length=9, vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(1)
    found, start = [], 0
    for step in range(8):
        if step:
            found.append(told_of(drafter.draft([text], [Budget(99, 9)]), 0))
        text.commit(torch.randint(vocabulary, (1 + step % 3,), generator=generator).tolist())
        rows = text.position - start
        seen = {layer: torch.randn(rows, hidden, generator=generator).to(head.dtype) for layer in drafter.layers}
        drafter.observe([Observation(text, [], seen, start)])
        start = text.position
    return found


@pytest.mark.skipif(choice.library() is None, reason="no compiler")
@each_pass
@pytest.mark.parametrize("params", [test_growth_in_c.GREEDY, test_growth_in_c.SEEDED], ids=["greedy", "seeded"])
def test_all_ways_to_grow_a_tree_tell_the_same(
    dtype: torch.dtype, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C, in plain numbers, in tensors, over the same pass."""
    monkeypatch.setattr(growth_in_c, "least_chance", lambda head: 0.0)
    target = target_of(dtype)
    in_c = told_in_life(test_growth_in_c.head_of("eagle3", target), params)
    monkeypatch.setattr(GrowthInC, "takes", lambda *given: False)
    on_host = told_in_life(test_growth_in_c.head_of("eagle3", target), params)
    monkeypatch.setattr(HeadRun, "grow", lambda *given: None)
    in_tensors = told_in_life(test_growth_in_c.head_of("eagle3", target), params)
    for others in (in_c, on_host):
        both = [(one, other) for one, other in zip(others, in_tensors, strict=True)]
        common = [(one[path], other[path]) for one, other in both for path in one.keys() & other.keys()]
        exact = dtype == torch.float32
        assert len(common) > (0.99 if exact else 0.9) * sum(map(len, in_tensors))
        near = pytest.approx([other for _, other in common], rel=1e-4 if exact else 0.02)
        assert [one for one, _ in common] == near
    assert len({round(chance, 6) for told in in_tensors for chance in told.values()}) > 20


# --- what drafts by what was seen -------------------------------------------------------------------------------


def test_suffix_tells_what_it_weighs_by() -> None:
    drafter = make_drafter("suffix", setup(), {"tokens": "12"})
    text = Sequence([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 4, 9, 1, 2], 100)
    tree = drafter.draft([text], [AMPLE])
    assert isinstance(drafter, Suffix)
    told, values = told_of(tree, 0), drafter._guesses[text.id].values
    assert len(told) > 4
    for path, value in zip(paths_of(tree, 0), values, strict=True):
        assert math.prod(told[path[: depth + 1]] for depth in range(len(path))) == pytest.approx(value)


def test_retrieval_tells_the_shares_of_places(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6, 7]]
    options = retrieval.Options("x", 2, 2, 2, 20, min_confidence=0.0)
    drafter = test_retrieval.drafter_of(test_retrieval.store_of(tmp_path, documents), options)
    tree = drafter.draft([Sequence([9, 1, 2], 100)], [AMPLE])
    trust = drafter._trust.chances[2]
    expected = {(): 1.0, (3,): 0.75 * trust, (6,): 0.25 * trust, (3, 5): 2 / 3, (3, 4): 1 / 3, (6, 7): 1.0}
    assert told_of(tree, 0) == pytest.approx(expected)


def test_two_drafters_tell_what_they_are_combined_by() -> None:
    drafter = make_drafter("combine", setup(), {"first": "suffix", "second": "ngram", "min_confidence": "0"})
    text = Sequence([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 4, 9, 1, 2], 100)
    tree = drafter.draft([text], [AMPLE])
    told = told_of(tree, 0)
    assert len(told) > 4
    assert all(0 < chance <= 1 for chance in told.values())
    assert len(set(told.values())) > 2


def test_look_ahead_rows_tell_their_accuracies() -> None:
    """By depth and rank, as they were measured; silent rows tell nothing."""
    made, one, chosen = test_parallel.drafter(nodes=14), sequence(3), random.Random(3)
    table = falling(parallel.ACCURACIES, 3, 8)
    compared = 0
    for _ in range(12):
        tree = made.draft([one], [test_parallel.PLENTY])
        if tree.size > 1:
            told = told_of(tree, 0)
            ranks: dict[Ranks, int] = {}
            for path, found in list(told.items())[1:]:
                rank = ranks[path[:-1]] = ranks.get(path[:-1], -1) + 1
                assert found == pytest.approx(table[len(path) - 1][rank])
                compared += 1
        checked, committed = test_parallel.check(tree, 0, one, made.top), accept_some(tree, 0, chosen)
        one.commit(committed)
        made.observe([Observation(one, committed, {}, 0, checked)])
    assert compared > 20


@pytest.mark.parametrize("name", ["none", "ngram", "recycling", "lookahead"])
def test_others_tell_nothing(name: str) -> None:
    tree = make_drafter(name, setup()).draft([Sequence([1, 2, 3, 1, 2], 100)], [AMPLE])
    assert tree.confidences() == [None]
